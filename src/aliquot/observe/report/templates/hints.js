for (const plot of document.querySelectorAll(".plot")) {
  const hints = JSON.parse(plot.dataset.hints);
  if (!hints.length) continue;
  const line = plot.appendChild(document.createElement("i"));
  const box = plot.appendChild(document.createElement("output"));
  line.className = "hint-line";
  box.className = "hint";
  plot.addEventListener("pointermove", (event) => {
    const area = plot.getBoundingClientRect();
    const at = (event.clientX - area.left) / area.width;
    const near = hints.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
    box.textContent = near[1];
    line.style.left = near[0] * 100 + "%";
    box.style.left = Math.max(0, Math.min(near[0] * area.width + 10, area.width - box.offsetWidth)) + "px";
    plot.classList.add("pointed");
  });
  plot.addEventListener("pointerleave", () => plot.classList.remove("pointed"));
}
