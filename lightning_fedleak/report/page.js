"use strict";
(() => {
  const element = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const name in attributes) node.setAttribute(name, attributes[name]);
    node.append(...children);
    return node;
  };

  // A hair line and a slider over the charts of one axis; the numbers are those of the table.
  const withSlider = (figure) => {
    const rows = [...figure.querySelectorAll("tbody tr")];
    const names = [...figure.querySelectorAll("thead th")].map((cell) => cell.textContent);
    if (rows.length < 2) return;
    const places = rows.map((row) => Number(row.dataset.place));
    const charts = [...figure.querySelectorAll("svg")].map((svg) => {
      const [left, right, first, last, bottom] = svg.dataset.axis.split(" ").map(Number);
      const line = document.createElementNS(svg.namespaceURI, "line");
      line.setAttribute("class", "hair");
      line.setAttribute("y1", 12);
      line.setAttribute("y2", bottom);
      svg.append(line);
      return {svg, line, left, right, first, last};
    });
    const slider = element("input", {type: "range", min: 0, max: rows.length - 1, "aria-label": `${names[0]} to read`});
    const output = element("div", {class: "read-out", role: "status"});
    const latest = (row, column) => {
      for (let i = row; i >= 0; i--) if (rows[i].cells[column].textContent) return i;
      return -1;
    };
    const move = (index) => {
      const step = rows[index].cells[0].textContent;
      slider.value = index;
      slider.setAttribute("aria-valuetext", `${names[0]} ${step}`);
      for (const {line, left, right, first, last} of charts) {
        const x = left + ((places[index] - first) / (last - first)) * (right - left);
        line.setAttribute("x1", x);
        line.setAttribute("x2", x);
      }
      const shown = [element("span", {}, element("b", {}, `${names[0]} ${step}`))];
      for (let column = 1; column < names.length; column++) {
        const row = latest(index, column);
        const cell = row < 0 ? null : rows[row].cells[column];
        const [value, ...rest] = cell ? cell.textContent.split(", ") : ["no result yet"];
        const more = row >= 0 && row !== index ? [...rest, `${names[0]} ${rows[row].cells[0].textContent}`] : rest;
        shown.push(element("span", {class: cell ? cell.className : ""}, `${names[column]} `, element("b", {}, value), more.length ? `, ${more.join(", ")}` : ""));
      }
      output.replaceChildren(...shown);
    };
    slider.addEventListener("input", () => move(Number(slider.value)));
    for (const {svg, left, right, first, last} of charts) {
      svg.addEventListener("pointermove", (event) => {
        const box = svg.getBoundingClientRect();
        const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
        const place = first + ((x - left) / (right - left)) * (last - first);
        let nearest = 0;
        places.forEach((other, i) => { if (Math.abs(other - place) < Math.abs(places[nearest] - place)) nearest = i; });
        move(nearest);
      });
    }
    const rail = element("div", {}, slider);
    const align = () => {
      const chart = charts.find(({svg}) => svg.clientWidth > 0);
      if (!chart) return;
      const scale = chart.svg.clientWidth / chart.svg.viewBox.baseVal.width;
      const [from, to] = [places[0], places.at(-1)].map((place) =>
        chart.left + ((place - chart.first) / (chart.last - chart.first)) * (chart.right - chart.left));
      rail.style.paddingLeft = `${from * scale - 8}px`;
      rail.style.paddingRight = `${chart.svg.clientWidth - to * scale - 8}px`;
    };
    figure.querySelector("details").before(rail, output);
    new ResizeObserver(align).observe(figure);
    align();
    move(rows.length - 1);
  };

  // One heat map at a time, where there are several.
  const withChoice = (figure, number) => {
    const maps = [...figure.querySelectorAll(".heat")];
    if (maps.length < 2) return;
    const choice = element("fieldset", {class: "seg"}, element("legend", {class: "vh"}, "Attack"));
    const show = (chosen) => maps.forEach((map) => { map.hidden = map !== chosen; });
    maps.forEach((map, i) => {
      const input = element("input", {type: "radio", name: `heat${number}`});
      input.checked = i === 0;
      input.addEventListener("change", () => show(map));
      choice.append(element("label", {}, input, map.dataset.name));
    });
    maps[0].before(choice);
    show(maps[0]);
  };

  // The page of a run that goes on loads itself again; what is open and the place stay as they are.
  const live = (seconds) => {
    const details = [...document.querySelectorAll("details")];
    const inputs = [...document.querySelectorAll("input")];
    const atEnd = (input) => input.type === "range" && input.value === input.max;
    const before = JSON.parse(sessionStorage.getItem(location.pathname) ?? "null");
    if (before && before.details.length === details.length && before.inputs.length === inputs.length) {
      details.forEach((one, i) => { one.open = before.details[i]; });
      inputs.forEach((input, i) => {
        if (before.inputs[i] === null) return;
        if (input.type === "range") input.value = before.inputs[i];
        else input.checked = before.inputs[i];
        if (input.type === "range" || input.checked) input.dispatchEvent(new Event(input.type === "range" ? "input" : "change"));
      });
    }
    if (before) scrollTo(0, before.top);
    setTimeout(() => {
      const now = {
        details: details.map((one) => one.open),
        inputs: inputs.map((input) => (atEnd(input) ? null : input.type === "range" ? input.value : input.checked)),
        top: scrollY,
      };
      sessionStorage.setItem(location.pathname, JSON.stringify(now));
      location.reload();
    }, 1000 * seconds);
  };

  document.querySelectorAll("figure.over_steps").forEach(withSlider);
  document.querySelectorAll("figure.heat_map").forEach(withChoice);
  const written = document.documentElement.dataset.live;
  const hours = (Date.now() / 1000 - written) / 3600; // without a look; a killed run never ends
  if (written && hours < 24) live(hours < 1 ? 5 : 60);
  const print = (open) => document.querySelectorAll("details").forEach((one) => {
    if (open) one.dataset.open = one.open;
    one.open = open || one.dataset.open === "true";
  });
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
})();
