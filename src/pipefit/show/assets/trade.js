// Memory against time: the point that is clicked, or reached by keyboard, is told below the drawing and in the table.
(function () {
  const told = document.getElementById("trade-picked");
  const drawing = document.getElementById("trade-drawing");
  if (!told || !drawing) return;
  const points = [...drawing.querySelectorAll(".trade-point")];
  function pick(point) {
    told.innerHTML = point.dataset.words;
    for (const other of points) other.classList.toggle("picked", other === point);
    for (const cell of document.querySelectorAll("[data-trade-row]"))
      cell.closest("tr").classList.toggle("picked", cell.dataset.tradeRow === point.dataset.trade);
  }
  for (const point of points) {
    point.addEventListener("click", () => pick(point));
    point.addEventListener("focus", () => pick(point));
  }
})();
