// Causal attention within the documents of a packed row, on CPUs with bf16 instructions of 512 bits.
//
// oneDNN's small matrix products, which libtorch_cpu exports as brgemm, multiply tiles of 64 queries and 64 keys. Scores
// are transposed, [keys, queries]: softmax then needs no sums within vectors, and its result is the right operand of the
// next product. Softmax is computed online in fp32. Only its log-sum-exp (to base 2) is stored; the backward pass
// computes the probabilities again.
//
// Right operands of brgemm have the VNNI layout: two rows in one, as pairs of bf16.

#define CPU_CAPABILITY AVX512  // selects the vector functions of ATen
#define CPU_CAPABILITY_AVX512

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

using at::BFloat16;
using at::native::cpublas::brgemm;
using Floats = __m512;  // of 16 queries, or of 16 elements of a head
using Pair = uint32_t;  // two elements of bf16

constexpr int64_t TILE = 64;  // queries and keys of a tile
constexpr int64_t STEP = 16;  // the last tile of a document has a multiple of this many queries and keys
constexpr int64_t PART = 32;  // queries of a tile on the diagonal are multiplied in parts, with the keys they may see
constexpr float LOG2E = 1.44269504f;
constexpr float LOWEST = -1e30f;

struct Layer {
  int64_t heads, kv_heads, width, value_width, window, documents;
  const int64_t* edges;  // documents + 1
  double scaling;
};

struct Rows {  // the rows of one head in [tokens, heads, width]
  BFloat16* first;
  int64_t stride, width;

  Rows(const void* x, int64_t head, int64_t heads, int64_t width)
      : first((BFloat16*)x + head * width), stride(heads * width), width(width) {}
  BFloat16* at(int64_t token) const { return first + token * stride; }
  // Copy rows to [padded, width], followed by zeros.
  void copy(int64_t token, int64_t count, int64_t padded, BFloat16* out) const {
    for (int64_t r = 0; r < count; r++) std::memcpy(out + r * width, at(token + r), width * 2);
    std::memset(out + count * width, 0, (padded - count) * width * 2);
  }
};

template <typename T>
struct Buffer {
  T* data;
  explicit Buffer(int64_t count) : data((T*)std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)) {}
  Buffer(const Buffer&) = delete;
  ~Buffer() { std::free(data); }
  operator T*() const { return data; }
};

struct Document {
  int64_t start, length;
  int64_t tiles() const { return (length + TILE - 1) / TILE; }
  int64_t real(int64_t tile) const { return std::min(TILE, length - tile * TILE); }
  int64_t size(int64_t tile) const { return (real(tile) + STEP - 1) / STEP * STEP; }
};

inline Floats floats(float x) { return _mm512_set1_ps(x); }
inline __m256i rounded(Floats x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline __m256i load16(const BFloat16* x) { return _mm256_loadu_si256((const __m256i*)x); }
inline void store16(BFloat16* x, __m256i halves) { _mm256_storeu_si256((__m256i*)x, halves); }
inline __m512i paired(__m256i even, __m256i odd) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

// 2^x for x < 128, with a relative error of 4e-6; 0 below -126.
inline Floats exp2(Floats x) {
  __mmask16 normal = _mm512_cmp_ps_mask(x, floats(-126.f), _CMP_GT_OQ);
  Floats shifted = _mm512_add_ps(x, floats(12582912.f));  // its lowest bits are the nearest integer
  Floats f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, floats(12582912.f)));
  Floats y = floats(1.3276472e-3f);
  for (float c : {9.6755413e-3f, 5.5507133e-2f, 2.4022120e-1f, 6.9314699e-1f, 1.0000001f}) y = _mm512_fmadd_ps(y, f, floats(c));
  __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(normal, _mm512_castps_si512(y), power));
}

// Which of the 16 queries from `query` on see `key`; both are positions in one document.
inline __mmask16 visible(int64_t query, int64_t key, int64_t window) {
  __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i distance = _mm512_add_epi32(_mm512_set1_epi32(query - key), lanes);
  return _mm512_cmpge_epi32_mask(distance, _mm512_setzero_si512()) & _mm512_cmplt_epi32_mask(distance, _mm512_set1_epi32(window));
}

void transpose(const Pair* x, int64_t ld, int64_t rows, int64_t columns, Pair* out, int64_t ld_out) {
  for (int64_t r = 0; r < rows; r += 16)
    for (int64_t c = 0; c < columns; c += 16)
      at::vec::transpose_mxn<float>((const float*)x + r * ld + c, ld, (float*)out + c * ld_out + r, ld_out,
                                    std::min<int64_t>(16, rows - r), std::min<int64_t>(16, columns - c));
}

// [count, width] to the VNNI layout, [count / 2, width] pairs.
void pack(const BFloat16* x, int64_t count, int64_t width, Pair* out) {
  for (int64_t r = 0; r < count; r += 2)
    for (int64_t d = 0; d < width; d += 16)
      _mm512_storeu_si512(out + r / 2 * width + d, paired(load16(x + r * width + d), load16(x + (r + 1) * width + d)));
}

// [count, width] to the VNNI layout of its transpose, [width / 2, TILE] pairs.
void pack_transposed(const BFloat16* x, int64_t count, int64_t width, Pair* out) {
  transpose((const Pair*)x, width / 2, count, width / 2, out, TILE);
}

// [TILE, width] to [width, TILE].
void transpose_halves(const BFloat16* x, int64_t width, BFloat16* out, Pair* scratch) {
  pack(x, TILE, width, scratch);
  transpose(scratch, width, TILE / 2, width, (Pair*)out, TILE / 2);
}

// Store fp32 [width, TILE] times factors [TILE] as rows.
void store_transposed(const float* x, int64_t count, const float* factors, const Rows& out, int64_t token) {
  alignas(64) float block[16 * 16];
  for (int64_t c = 0; c < count; c += 16)
    for (int64_t d = 0; d < out.width; d += 16) {
      at::vec::transpose_mxn<float>(x + d * TILE + c, TILE, block, 16, 16, 16);
      for (int64_t r = c; r < std::min(count, c + 16); r++)
        store16(out.at(token + r) + d, rounded(_mm512_mul_ps(_mm512_load_ps(block + 16 * (r - c)), floats(factors[r]))));
    }
}

int64_t longest_of(const Layer& layer) {
  int64_t longest = 0;
  for (int64_t n = 0; n < layer.documents; n++) longest = std::max(longest, layer.edges[n + 1] - layer.edges[n]);
  return (longest + TILE - 1) / TILE * TILE;
}

// Call `multiply(tile of keys, first query, queries, keys)` for all keys that the queries of a tile may see.
template <typename F>
void for_each_part(const Layer& layer, const Document& document, int64_t tile, const F& multiply) {
  int64_t queries = document.size(tile);
  int64_t first = std::max<int64_t>(0, tile * TILE - layer.window + 1) / TILE;
  for (int64_t keys = first; keys < tile; keys++) multiply(keys, 0, queries, TILE, keys == first);
  for (int64_t c = 0; c < queries; c += PART)
    multiply(tile, c, std::min(PART, queries - c), std::min(queries, c + PART), first == tile);
}

template <typename F>
void for_each_key_head(const Layer& layer, const F& work) {
  at::parallel_for(0, layer.kv_heads, 1, [&](int64_t from, int64_t to) {
    work(from, to);
    at::native::cpublas::brgemm_release();  // the tiles of AMX
  });
}

// query [T, H, D], key [T, H_kv, D], value [T, H_kv, E] -> out [T, H, E], log_sums [H, T]
extern "C" void attend(const Layer& layer, const void* query, const void* key, const void* value, void* out, float* log_sums) {
  const int64_t D = layer.width, E = layer.value_width, group = layer.heads / layer.kv_heads;
  const int64_t longest = longest_of(layer), tokens = layer.edges[layer.documents];
  const Floats scale = floats(layer.scaling * LOG2E);
  for_each_key_head(layer, [&](int64_t from, int64_t to) {
    Buffer<BFloat16> keys(longest * D), values_t(longest * E), rows(TILE * std::max(D, E));
    Buffer<Pair> queries(D / 2 * TILE), p(TILE / 2 * TILE), scratch(TILE / 2 * E);
    Buffer<float> s(TILE * TILE), sums(E * TILE), maxima(TILE), norms(TILE);
    for (int64_t kv = from; kv < to; kv++)
      for (int64_t n = 0; n < layer.documents; n++) {
        Document document{layer.edges[n], layer.edges[n + 1] - layer.edges[n]};
        Rows(key, kv, layer.kv_heads, D).copy(document.start, document.length, document.tiles() * TILE, keys);
        for (int64_t j = 0; j < document.tiles(); j++) {
          Rows(value, kv, layer.kv_heads, E).copy(document.start + j * TILE, document.real(j), TILE, rows);
          transpose_halves(rows, E, values_t + j * TILE * E, scratch);
        }
        for (int64_t h = kv * group; h < (kv + 1) * group; h++)
          for (int64_t i = 0; i < document.tiles(); i++) {
            const int64_t token = document.start + i * TILE, real = document.real(i);
            Rows(query, h, layer.heads, D).copy(token, real, document.size(i), rows);
            pack_transposed(rows, document.size(i), D, queries);
            for_each_part(layer, document, i, [&](int64_t j, int64_t c0, int64_t cn, int64_t kn, bool first) {
              brgemm(kn, cn, D, D, TILE, TILE, false, keys + j * TILE * D, (BFloat16*)(queries + c0), s + c0);
              const bool masked = j == i || (i - j + 1) * TILE - 1 >= layer.window;
              for (int64_t c = c0; c < c0 + cn; c += 16) {
                const int64_t position = (i - j) * TILE + c, last = j == i ? std::min(kn, c + 16) : kn;
                Floats top = floats(LOWEST), total = floats(0), before = first ? top : _mm512_load_ps(maxima + c);
                for (int64_t r = 0; r < last; r++) {
                  Floats x = _mm512_load_ps(s + r * TILE + c);
                  if (masked) {
                    x = _mm512_mask_blend_ps(visible(position, r, layer.window), floats(-INFINITY), x);
                    _mm512_store_ps(s + r * TILE + c, x);
                  }
                  top = _mm512_max_ps(top, x);
                }
                Floats maximum = _mm512_max_ps(before, _mm512_mul_ps(top, scale));
                for (int64_t r = 0; r < last; r += 2) {
                  Floats a = exp2(_mm512_fmsub_ps(_mm512_load_ps(s + r * TILE + c), scale, maximum));
                  Floats b = exp2(_mm512_fmsub_ps(_mm512_load_ps(s + (r + 1) * TILE + c), scale, maximum));
                  total = _mm512_add_ps(total, _mm512_add_ps(a, b));
                  _mm512_store_si512(p + r / 2 * TILE + c, paired(rounded(a), rounded(b)));
                }
                for (int64_t r = last; r < kn; r += 2) _mm512_store_si512(p + r / 2 * TILE + c, _mm512_setzero_si512());
                if (!first) {
                  Floats factor = exp2(_mm512_sub_ps(before, maximum));
                  total = _mm512_fmadd_ps(_mm512_load_ps(norms + c), factor, total);
                  if (_mm512_cmp_ps_mask(before, maximum, _CMP_LT_OQ))
                    for (float* x = sums + c; x < sums + E * TILE; x += TILE)
                      _mm512_store_ps(x, _mm512_mul_ps(_mm512_load_ps(x), factor));
                }
                _mm512_store_ps(maxima + c, maximum);
                _mm512_store_ps(norms + c, total);
              }
              brgemm(E, cn, kn, TILE, TILE, TILE, !first, values_t + j * TILE * E, (BFloat16*)(p + c0), sums + c0);
            });
            for (int64_t c = 0; c < real; c++) log_sums[h * tokens + token + c] = maxima[c] + std::log2(norms[c]);
            for (int64_t c = 0; c < real; c++) norms[c] = 1 / norms[c];
            store_transposed(sums, real, norms, Rows(out, h, layer.heads, E), token);
          }
      }
  });
}

// The gradients of query, key and value, in their shapes, from the gradient of `out`.
extern "C" void differentiate(const Layer& layer, const void* query, const void* key, const void* value, const void* out,
                              const float* log_sums, const void* gradient, void* query_gradient, void* key_gradient,
                              void* value_gradient) {
  const int64_t D = layer.width, E = layer.value_width, group = layer.heads / layer.kv_heads;
  const int64_t longest = longest_of(layer), tokens = layer.edges[layer.documents];
  const Floats scale = floats(layer.scaling * LOG2E);
  for_each_key_head(layer, [&](int64_t from, int64_t to) {
    Buffer<BFloat16> keys(longest * D), keys_t(longest * D), values(longest * E), p(TILE * TILE), ds(TILE * TILE);
    Buffer<BFloat16> q(TILE * D), g(TILE * E), o(TILE * E);
    Buffer<Pair> q_t(D / 2 * TILE), g_t(E / 2 * TILE), q_pairs(TILE / 2 * D), g_pairs(TILE / 2 * E), ds_pairs(TILE / 2 * TILE);
    Buffer<float> s(TILE * TILE), dp(TILE * TILE), dq(D * TILE), dk(longest * D), dv(longest * E);
    Buffer<float> shift(TILE), norms(TILE), factors(TILE);
    std::fill_n(factors.data, TILE, layer.scaling);
    for (int64_t kv = from; kv < to; kv++)
      for (int64_t n = 0; n < layer.documents; n++) {
        Document document{layer.edges[n], layer.edges[n + 1] - layer.edges[n]};
        const int64_t padded = document.tiles() * TILE;
        Rows(key, kv, layer.kv_heads, D).copy(document.start, document.length, padded, keys);
        Rows(value, kv, layer.kv_heads, E).copy(document.start, document.length, padded, values);
        for (int64_t j = 0; j < document.tiles(); j++) transpose_halves(keys + j * TILE * D, D, keys_t + j * TILE * D, q_pairs);
        std::fill_n(dk.data, padded * D, 0.f);
        std::fill_n(dv.data, padded * E, 0.f);
        for (int64_t h = kv * group; h < (kv + 1) * group; h++)
          for (int64_t i = 0; i < document.tiles(); i++) {
            const int64_t token = document.start + i * TILE, real = document.real(i), size = document.size(i);
            Rows(query, h, layer.heads, D).copy(token, real, size, q);
            Rows(gradient, h, layer.heads, E).copy(token, real, size, g);
            Rows(out, h, layer.heads, E).copy(token, real, size, o);
            pack_transposed(q, size, D, q_t);
            pack_transposed(g, size, E, g_t);
            pack(q, size, D, q_pairs);
            pack(g, size, E, g_pairs);
            for (int64_t c = 0; c < size; c++) {  // what softmax subtracts from the gradients of probabilities
              Floats products = floats(0);
              for (int64_t d = 0; d < E; d += 16)
                products = _mm512_fmadd_ps(_mm512_cvtpbh_ps((__m256bh)load16(g + c * E + d)),
                                           _mm512_cvtpbh_ps((__m256bh)load16(o + c * E + d)), products);
              shift[c] = _mm512_reduce_add_ps(products);
              norms[c] = c < real ? log_sums[h * tokens + token + c] : 0;
            }
            for_each_part(layer, document, i, [&](int64_t j, int64_t c0, int64_t cn, int64_t kn, bool first) {
              brgemm(kn, cn, D, D, TILE, TILE, false, keys + j * TILE * D, (BFloat16*)(q_t + c0), s + c0);
              brgemm(kn, cn, E, E, TILE, TILE, false, values + j * TILE * E, (BFloat16*)(g_t + c0), dp + c0);
              const bool masked = j == i || (i - j + 1) * TILE - 1 >= layer.window;
              for (int64_t c = c0; c < c0 + cn; c += 16) {
                const int64_t position = (i - j) * TILE + c, last = j == i ? std::min(kn, c + 16) : kn;
                const Floats norm = _mm512_load_ps(norms + c), subtracted = _mm512_load_ps(shift + c);
                auto one = [&](int64_t r) {  // a key; returns the gradients of its scores
                  Floats x = exp2(_mm512_fmsub_ps(_mm512_load_ps(s + r * TILE + c), scale, norm));
                  if (masked) x = _mm512_maskz_mov_ps(visible(position, r, layer.window), x);
                  store16(p + r * TILE + c, rounded(x));
                  __m256i y = rounded(_mm512_mul_ps(x, _mm512_sub_ps(_mm512_load_ps(dp + r * TILE + c), subtracted)));
                  store16(ds + r * TILE + c, y);
                  return y;
                };
                for (int64_t r = 0; r < last; r += 2) {
                  __m256i even = one(r), odd = one(r + 1);
                  _mm512_store_si512(ds_pairs + r / 2 * TILE + c, paired(even, odd));
                }
                for (int64_t r = last; r < kn; r++) {
                  store16(p + r * TILE + c, _mm256_setzero_si256());
                  store16(ds + r * TILE + c, _mm256_setzero_si256());
                  _mm512_store_si512(ds_pairs + r / 2 * TILE + c, _mm512_setzero_si512());
                }
              }
              brgemm(kn, E, cn, TILE, E, E, true, p + c0, (BFloat16*)(g_pairs + c0 / 2 * E), dv + j * TILE * E);
              brgemm(kn, D, cn, TILE, D, D, true, ds + c0, (BFloat16*)(q_pairs + c0 / 2 * D), dk + j * TILE * D);
              brgemm(D, cn, kn, TILE, TILE, TILE, !first, keys_t + j * TILE * D, (BFloat16*)(ds_pairs + c0), dq + c0);
            });
            store_transposed(dq, real, factors, Rows(query_gradient, h, layer.heads, D), token);
          }
        auto store = [&](const float* x, const Rows& rows, float factor) {
          for (int64_t r = 0; r < document.length; r++)
            for (int64_t d = 0; d < rows.width; d += 16)
              store16(rows.at(document.start + r) + d, rounded(_mm512_mul_ps(_mm512_load_ps(x + r * rows.width + d), floats(factor))));
        };
        store(dk, Rows(key_gradient, kv, layer.kv_heads, D), layer.scaling);
        store(dv, Rows(value_gradient, kv, layer.kv_heads, E), 1);
      }
  });
}
