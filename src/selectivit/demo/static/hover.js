// Names the classes under the pointer, or at the place that the arrow keys move.
let grid, source, cell;
const tell = (probe, row, column) => {
  const text = probe.dataset.grid;
  if (text !== source) [source, grid, cell] = [text, JSON.parse(text), undefined];
  row = Math.min(Math.max(row, 0), grid.rows - 1);
  column = Math.min(Math.max(column, 0), grid.columns - 1);
  const next = row * grid.columns + column;
  if (next === cell) return;
  cell = next;
  const mark = probe.querySelector(".sv-mark");
  mark.hidden = false;
  mark.style.top = `${(100 * row) / grid.rows}%`;
  mark.style.left = `${(100 * column) / grid.columns}%`;
  const found = grid.best[cell].map((name, i) => `${grid.names[name]} ${grid.percent[cell][i]} %`);
  element.querySelector(".sv-told").textContent = found.join(" · ");
};
element.addEventListener("pointermove", (event) => {
  const probe = event.target.closest(".sv-probe");
  if (!probe) return;
  const box = probe.querySelector("img").getBoundingClientRect();
  const { rows, columns } = JSON.parse(probe.dataset.size);
  tell(
    probe,
    Math.floor((rows * (event.clientY - box.top)) / box.height),
    Math.floor((columns * (event.clientX - box.left)) / box.width),
  );
});
element.addEventListener("keydown", (event) => {
  const probe = event.target.closest(".sv-probe");
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!probe || !step) return;
  event.preventDefault();
  const { rows, columns } = JSON.parse(probe.dataset.size);
  const here = cell === undefined ? [Math.floor(rows / 2), Math.floor(columns / 2)] : [Math.floor(cell / columns), cell % columns];
  tell(probe, here[0] + step[0], here[1] + step[1]);
});
watch("value", () => {
  source = undefined;
});
