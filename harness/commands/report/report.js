'use strict';
// Everything that is shown comes from the data as text: elements are made here, and no text is ever read as HTML.
const data = JSON.parse(document.getElementById('data').textContent);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on'))
      element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ''));
  return element;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);

const count = (n) => n.toLocaleString('en-US');
const plural = (n, one, many = one + 's') => `${count(n)} ${n === 1 ? one : many}`;
function rounded(x, digits = 3) {
  if (x === null) return 'not finite';
  return x !== 0 && Math.abs(x) < 1e-3 ? x.toExponential(digits - 1) : Number(x.toPrecision(digits)).toString();
}
function duration(seconds) {
  if (seconds < 120) return `${rounded(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${rounded(minutes / 60)} h`;
}
// Far apart from each other and from red, which is for what is wrong; white letters can be read on them.
const kHues = [212, 268, 172, 32, 140, 300, 52, 232];
const colour = (i) => `hsl(${kHues[i % kHues.length]} 60% ${i % 16 < 8 ? 40 : 55}%)`;

// The words of a case, apart from what stands in brackets.
function words(text) {
  const found = [];
  let depth = 0, word = '';
  for (const c of text) {
    depth += c === '(' ? 1 : c === ')' ? -1 : 0;
    if (c === ' ' && depth === 0) {
      found.push(word);
      word = '';
    } else
      word += c;
  }
  return [...found, word];
}
const head = (word) => (word || '').split('(')[0];
function described(text) {
  const [model, mesh, strategy, , mode] = words(text);
  const axes = (mesh || '').replace(/^mesh\(|\)$/g, '');
  const ranks = axes.split(',').reduce((product, axis) => product * (Number(axis.split('=')[1]) || 1), 1);
  return {model: head(model), mesh: axes || 'one rank', ranks, strategy: head(strategy), mode: mode || ''};
}

function command(text) {
  const said = el('span', {class: 'hidden', 'aria-live': 'polite'});
  const button =
      el('button', {
        type: 'button',
        onclick: async () => {
          try {
            await navigator.clipboard.writeText(text);
            button.textContent = said.textContent = 'Copied';
          } catch (error) {  // pages of the file system may not write there
            getSelection().selectAllChildren(code);
            button.textContent = said.textContent = 'Selected; copy it now';
          }
          setTimeout(() => { button.textContent = 'Copy'; }, 2500);
        }
      },
         'Copy');
  const code = el('code', {}, text);
  return el('div', {class: 'command'}, code, button, said);
}
const facts = (...rows) =>
    el('dl', {class: 'facts'},
       rows.filter(([, value]) => value).map(([name, value]) => [el('dt', {}, name), el('dd', {}, value)]));
const scrolled = (label, ...content) => el('div', {class: 'scroll', tabindex: 0, role: 'region', 'aria-label': label}, content);
const tag = (good, text) => el('span', {class: good ? 'tag' : 'tag bad'}, text);
const options = (values) => [...new Set(values)].sort((a, b) => String(a).localeCompare(String(b), 'en', {numeric: true}));

function section(id, title, ...content) {
  document.getElementById('contents').append(el('li', {}, el('a', {href: '#' + id}, title)));
  document.getElementById('content').append(
      el('section', {id, 'aria-labelledby': id + '-title'}, el('h2', {id: id + '-title'}, title), content));
}

// A table that shows a page of its rows at a time. columns: {name, of(row) -> text or node, key(row), number, optional};
// filters: {name, of(row)}; text(row) is searched; detail(row) is shown under the row when its button is pressed.
function pagedTable({label, unit, rows, columns, filters, text, detail}) {
  const size = 25;
  const searched = rows.map((row) => text(row).toLowerCase());
  let shown = rows.map((_, i) => i), page = 0, sorted = null, descending = false;
  const search = el('input', {type: 'search', placeholder: 'all words have to occur', oninput: () => choose()});
  const selects = filters.map(
      (filter) =>
          el('select', {onchange: () => choose()}, el('option', {value: ''}, 'any'),
             options(rows.map(filter.of)).map((value) => el('option', {value}, value))));
  const body = el('tbody'), status = el('span', {'aria-live': 'polite'});
  const back = el('button', {type: 'button', onclick: () => turn(-1)}, 'Previous');
  const next = el('button', {type: 'button', onclick: () => turn(1)}, 'Next');
  const headers = columns.map(
      (column, i) =>
          el('th', {scope: 'col', class: classes(column)},
             el('button', {type: 'button', class: 'plain', title: 'Sort', onclick: () => sort(i)}, column.name)));

  function classes(column) {
    return [column.number && 'number', column.optional && 'optional'].filter(Boolean).join(' ') || null;
  }
  function turn(by) {
    page += by;
    show();
  }
  function choose() {
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    shown = [];
    rows.forEach((row, i) => {
      if (selects.every((select, f) => !select.value || String(filters[f].of(row)) === select.value) &&
          wanted.every((word) => searched[i].includes(word)))
        shown.push(i);
    });
    page = 0;
    arrange();
  }
  function sort(i) {
    descending = sorted === i && !descending;
    sorted = i;
    headers.forEach((header, h) => {
      if (h === i)
        header.setAttribute('aria-sort', descending ? 'descending' : 'ascending');
      else
        header.removeAttribute('aria-sort');
    });
    arrange();
  }
  function arrange() {
    if (sorted !== null) {
      const key = columns[sorted].key;
      const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
      shown.sort((a, b) => (descending ? order(key(rows[b]), key(rows[a])) : order(key(rows[a]), key(rows[b]))) || a - b);
    }
    show();
  }
  function row(i) {
    const cells = columns.map((column) => el('td', {class: classes(column)}, column.of(rows[i])));
    const line = el('tr', {}, cells);
    if (!detail) return line;
    const button =
        el('button', {
          type: 'button',
          class: 'plain',
          'aria-expanded': 'false',
          onclick: () => {
            const open = button.getAttribute('aria-expanded') === 'true';
            button.setAttribute('aria-expanded', String(!open));
            button.firstChild.textContent = open ? '▸ ' : '▾ ';
            if (open)
              line.nextSibling.remove();
            else
              line.after(el('tr', {class: 'detail'}, el('td', {colspan: columns.length}, detail(rows[i]))));
          }
        },
           el('span', {'aria-hidden': 'true'}, '▸ '), ...cells[0].childNodes);
    cells[0].append(button);
    return line;
  }
  function show() {
    const pages = Math.max(1, Math.ceil(shown.length / size));
    page = Math.min(Math.max(page, 0), pages - 1);
    const first = page * size, last = Math.min(first + size, shown.length);
    body.replaceChildren(...shown.slice(first, last).map(row));
    status.textContent =
        shown.length ? `${count(first + 1)} to ${count(last)} of ${plural(shown.length, unit)}` : `no ${unit} fits`;
    back.disabled = page === 0;
    next.disabled = page === pages - 1;
  }
  choose();
  return el(
      'div', {},
      el('div', {class: 'controls'}, el('label', {class: 'wide'}, 'Search', search),
         filters.map((filter, f) => el('label', {}, filter.name, selects[f]))),
      scrolled(
          label,
          el('table', {class: 'rows'}, el('caption', {class: 'hidden'}, label), el('thead', {}, el('tr', {}, headers)), body)),
      el('div', {class: 'controls'}, back, next, status));
}
