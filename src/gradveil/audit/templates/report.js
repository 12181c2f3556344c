"use strict";
(() => {
  const $ = (id) => document.getElementById(id);

  // Colour scheme: automatic, light, dark. Storage may be refused when the page is opened from disk.
  const themes = ["auto", "light", "dark"];
  const root = document.documentElement;
  const remember = (value) => { try { localStorage.setItem("gradveil-theme", value); } catch { /* not kept */ } };
  const recall = () => { try { return localStorage.getItem("gradveil-theme"); } catch { return null; } };
  const paint = (value) => {
    if (value === "auto") delete root.dataset.theme; else root.dataset.theme = value;
    const name = value[0].toUpperCase() + value.slice(1);
    $("theme").querySelector("span").textContent = name;
    $("theme").setAttribute("aria-label", `Colour scheme: ${value === "auto" ? "automatic" : value}`);
  };
  let theme = themes.includes(recall()) ? recall() : "auto";
  paint(theme);
  $("theme").addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    paint(theme);
    remember(theme);
  });

  // The two settings of the picture wall.
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  const choose = (tab) => tabs.forEach((other) => {
    const on = other === tab;
    other.setAttribute("aria-selected", String(on));
    other.tabIndex = on ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = !on;
  });
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = tabs[(i + step + tabs.length) % tabs.length];
      choose(next);
      next.focus();
    });
  });
  if (tabs.length) choose(tabs[0]);

  // A picture beside its original.
  const viewer = $("viewer");
  document.querySelectorAll(".zoom").forEach((button) => button.addEventListener("click", () => {
    $("viewer-title").textContent = button.dataset.title;
    $("viewer-scores").textContent = button.dataset.scores;
    $("viewer-original").src = `data:image/png;base64,${button.dataset.original}`;
    $("viewer-guess").src = button.querySelector("img").src;
    viewer.showModal();
  }));
  viewer.addEventListener("click", (event) => { if (event.target === viewer) viewer.close(); });

  // The chart's labels on hover and on focus.
  const tip = $("tip");
  const show = (point) => {
    const box = point.querySelector(".dot").getBoundingClientRect();
    tip.textContent = point.dataset.tip;
    tip.hidden = false;
    const left = Math.min(Math.max(8, box.left + box.width / 2 - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${left}px`;
    tip.style.top = `${Math.max(8, box.top - tip.offsetHeight - 10)}px`;
  };
  const hide = () => { tip.hidden = true; };
  document.querySelectorAll(".point").forEach((point) => {
    point.addEventListener("pointerenter", () => show(point));
    point.addEventListener("focus", () => show(point));
    point.addEventListener("pointerleave", hide);
    point.addEventListener("blur", hide);
  });
  // Moving to a point by keyboard scrolls too: its label moves along.
  addEventListener("scroll", () => {
    const point = document.activeElement?.closest(".point");
    if (point) show(point); else hide();
  }, { passive: true });

  // The table: sort and filter.
  const table = $("results");
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, i) => {
    const cell = row.cells[i];
    if (!("value" in cell.dataset)) return cell.textContent.trim().toLowerCase();
    return cell.dataset.value === "" ? null : Number(cell.dataset.value);
  };
  const sort = (i) => {
    const numeric = heads[i].classList.contains("num");
    const now = heads[i].getAttribute("aria-sort");
    const down = now ? now === "ascending" : numeric;
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[i].setAttribute("aria-sort", down ? "descending" : "ascending");
    const order = (a, b) => {
      const x = value(a, i), y = value(b, i);
      if (x === null || y === null) return (x === null) - (y === null);
      const sign = numeric ? x - y : x.localeCompare(y);
      return down ? -sign : sign;
    };
    body.append(...[...body.rows].sort(order));
  };
  heads.forEach((head, i) => head.querySelector("button").addEventListener("click", () => sort(i)));
  const filter = () => {
    const text = $("search").value.trim().toLowerCase();
    const column = $("filter-column").value, outcome = $("filter-outcome").value;
    let shown = 0;
    for (const row of body.rows) {
      row.hidden = !((!text || row.textContent.toLowerCase().includes(text))
        && (!column || row.dataset.column === column) && (!outcome || row.dataset.outcome === outcome));
      shown += !row.hidden;
    }
    $("count").textContent = `${shown} of ${body.rows.length} rows`;
  };
  ["search", "filter-column", "filter-outcome"].forEach((id) => $(id).addEventListener("input", filter));
  filter();

  // Which measure of a layer is shown.
  document.querySelectorAll('input[name="measure"]').forEach((input) => input.addEventListener("change", () => {
    document.querySelector("#layers table").dataset.measure = input.value;
  }));

  // Mark the section in view in the contents.
  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const watch = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (!entry.isIntersecting) return;
    links.forEach((a) => a.removeAttribute("aria-current"));
    links.get(entry.target.id).setAttribute("aria-current", "true");
  }), { rootMargin: "-15% 0px -75% 0px" });
  links.forEach((_, id) => { if ($(id)) watch.observe($(id)); });
})();
