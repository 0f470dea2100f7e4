// Two pictures on one place; a range input, which the keyboard moves too, says where one ends and the other begins.
let at = "50";
const show = () => {
  const wipe = element.querySelector(".sv-wipe");
  if (!wipe) return;
  wipe.style.setProperty("--at", `${at}%`);
  wipe.querySelector("input").value = at;
};
element.addEventListener("input", (event) => {
  if (!event.target.matches(".sv-wipe input")) return;
  at = event.target.value;
  show();
});
watch("value", show);
