// A photo as a button: a click, or the arrow keys, chooses a patch.
let waiting;
const choose = (button, row, column) => {
  const { rows, columns } = button.dataset;
  row = Math.min(Math.max(row, 0), rows - 1);
  column = Math.min(Math.max(column, 0), columns - 1);
  Object.assign(button.dataset, { row, column });
  const mark = button.querySelector(".sv-mark");
  mark.style.top = `${(100 * row) / rows}%`;
  mark.style.left = `${(100 * column) / columns}%`;
  button.setAttribute("aria-label", `${button.dataset.label}: row ${row + 1} of ${rows}, column ${column + 1} of ${columns}`);
  clearTimeout(waiting); // a held key ends in one question to the server
  waiting = setTimeout(() => trigger("pick", { row, column, rows: Number(rows), columns: Number(columns) }), 120);
};
element.addEventListener("click", (event) => {
  const button = event.target.closest(".sv-pick");
  if (!button || event.detail === 0) return; // 0: the keyboard's click, which has no place
  const box = button.querySelector("img").getBoundingClientRect();
  const { rows, columns } = button.dataset;
  choose(
    button,
    Math.floor((rows * (event.clientY - box.top)) / box.height),
    Math.floor((columns * (event.clientX - box.left)) / box.width),
  );
});
element.addEventListener("keydown", (event) => {
  const button = event.target.closest(".sv-pick");
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!button || !step) return;
  event.preventDefault();
  choose(button, Number(button.dataset.row) + step[0], Number(button.dataset.column) + step[1]);
});
