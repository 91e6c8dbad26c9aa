from pathlib import Path
def write_report(directories, out): pass
