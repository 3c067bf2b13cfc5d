// What makes the page go: the theme, and each drawing whose data is there.
const theme = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)"), themes = ["auto", "light", "dark"];
let choice = "auto";
function setTheme() {
  document.documentElement.dataset.theme = choice === "auto" ? (system.matches ? "dark" : "light") : choice;
  theme.textContent = choice[0].toUpperCase() + choice.slice(1);
  theme.setAttribute("aria-label", `Colours: ${choice === "auto" ? "as the system has them" : choice}`);
  repaint.forEach(again => again());
}
theme.addEventListener("click", () => { choice = themes[(themes.indexOf(choice) + 1) % 3]; setTheme(); });
system.addEventListener("change", setTheme);
setTheme();

if (DATA.timeline) new Timeline(DATA.timeline);
if (DATA.memory) memory(DATA.memory);
if (DATA.links) new Links(DATA.links);
if (DATA.training) training(DATA.training);
document.documentElement.dataset.ready = "yes";
