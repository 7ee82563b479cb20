function showCases() {
  if (!data.case_rows.length) return;
  const rows = data.case_rows.map(
      ([text, held, seconds, ratio, engine], i) => ({text, held, seconds, ratio, engine, number: i + 1, ...described(text)}));
  const replay = (row) => `${data.program} replay ${row.engine ? `--engine ${row.engine} ` : ''}'${row.text}'`;
  const error = (row) =>
      (row.mode !== 'fast'    ? 'none allowed' :
           row.ratio === null ? 'not finite' :
                                `${rounded(row.ratio / data.tolerance * 100, 2)} %`);
  section(
      'cases', 'Cases',
      data.cases_left_out ? el('p', {},
                               `${plural(data.cases_left_out, 'case')} that held ${data.cases_left_out === 1 ? 'is' : 'are'} ` +
                                   'not listed, to keep this page small. All figures count them.') :
                            '',
      el('p', {class: 'muted'},
         'Error is the largest distance from the truth as a part of the tolerance. Modes other than fast compare bits.'),
      pagedTable({
        label: 'Cases',
        unit: 'case',
        rows,
        text: (row) => row.text,
        columns: [
          {name: 'Case', key: (row) => row.number, of: (row) => count(row.number)},
          {name: 'Verdict', key: (row) => row.held, of: (row) => tag(row.held, row.held ? 'held' : 'failed')},
          {name: 'Strategy', key: (row) => row.strategy, of: (row) => row.strategy},
          {name: 'Model', key: (row) => row.model, of: (row) => row.model},
          {name: 'Mesh', key: (row) => row.ranks, of: (row) => row.mesh.replaceAll(',', ', ')},
          {name: 'Mode', optional: true, key: (row) => row.mode, of: (row) => row.mode}, {
            name: 'Error',
            optional: true,
            number: true,
            key: (row) => (row.mode !== 'fast' ? -1 : row.ratio ?? Infinity),
            of: error
          },
          {name: 'Seconds', optional: true, number: true, key: (row) => row.seconds, of: (row) => row.seconds.toFixed(3)}
        ],
        filters: [
          {name: 'Verdict', of: (row) => (row.held ? 'held' : 'failed')}, {name: 'Strategy', of: (row) => row.strategy},
          {name: 'Model', of: (row) => row.model}, {name: 'Ranks', of: (row) => row.ranks},
          {name: 'Mode', of: (row) => row.mode}
        ],
        detail: (row) => command(replay(row))
      }));
}

// The heat map is a grid: the arrow keys move in it, and the line below says what a cell is.
function heatMap(facets, drawn) {
  const values = facets.flatMap((facet, f) => facet.values.map((value, v) => ({value, facet: f, first: v === 0})));
  const rows = values.filter((value) => value.facet < facets.length - 1), columns = values.filter((value) => value.facet > 0);
  const most = Math.max(1, ...drawn.values());
  const level = (n) => Math.min(5, 1 + Math.floor(5 * Math.log(n) / Math.log(most + 1)));
  const line = el('p', {'aria-live': 'polite', class: 'muted'}, 'Point at a cell, or move with the arrow keys, to read it.');
  const cells = rows.map(() => []);
  const body = rows.map(
      (row, r) =>
          el('tr', {class: row.first ? 'first' : null}, el('th', {scope: 'row'}, row.value), columns.map((column, c) => {
            if (column.facet <= row.facet) return el('td', {class: column.first ? 'first' : null});
            const n = drawn.get(row.value + '\n' + column.value) || 0;
            const text = `${row.value} with ${column.value}: ${n ? plural(n, 'case') : 'never drawn'}`;
            const tell = () => { line.textContent = text; };
            const cell = el('td', {
              class: `${n ? 'heat-' + level(n) : 'never'}${column.first ? ' first' : ''}`,
              title: text,
              'aria-label': text,
              role: 'gridcell',
              tabindex: -1,
              onmouseenter: tell,
              onfocus: tell,
              onkeydown: (event) => move(event, r, c)
            });
            cells[r][c] = cell;
            return cell;
          })));
  function move(event, r, c) {
    const [down, right] = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key] || [0, 0];
    const target = (cells[r + down] || [])[c + right];
    if (!down && !right) return;
    event.preventDefault();
    if (target) {
      cells[r][c].tabIndex = -1;
      target.tabIndex = 0;
      target.focus();
    }
  }
  const start = cells[0].find(Boolean);
  if (start) start.tabIndex = 0;
  return [
    line,
    el('ul', {class: 'legend'}, el('li', {}, el('i', {class: 'never'}), 'never'),
       [1, 2, 3, 4, 5].map(
           (n) =>
               el('li', {}, el('i', {class: 'heat-' + n}),
                  n === 1     ? 'seldom' :
                      n === 5 ? `often, up to ${count(most)}` :
                                ''))),
    el('div', {class: 'scroll'},
       el('table', {class: 'heat', role: 'grid', 'aria-label': 'Cases by pairs of values'},
          el('thead', {},
             el('tr', {}, el('td'), columns.map((column) => el('th', {scope: 'col'}, el('span', {}, column.value))))),
          el('tbody', {}, body)))
  ];
}

// Of all facets, where the map shows the chief ones.
function combinationsText(all) {
  const percent = (drawn, valid) => (100 * drawn / Math.max(1, valid)).toFixed(1) + '%';
  return `Of all ${all.facets} respects: ${percent(all.pairs_drawn, all.pairs_valid)} of ` +
      `${plural(all.pairs_valid, 'valid pair')} of values were drawn, and ` +
      `${percent(all.triples_drawn, all.triples_valid)} of ${plural(all.triples_valid, 'triple')}.`;
}

function showCoverage() {
  const features = Object.entries(data.features), never = features.filter(([, n]) => n === 0);
  if (!features.length) return;
  const content = [];
  if (data.facets.length > 1) {
    const drawn = new Map(data.pairs.map(([first, second, n]) => [first + '\n' + second, n])), missing = [];
    let all = 0;
    data.facets.forEach(
        (a, i) => data.facets.slice(i + 1).forEach((b) => a.values.forEach((first) => b.values.forEach((second) => {
          ++all;
          if (!drawn.has(first + '\n' + second)) missing.push(`${first} with ${second}`);
        }))));
    content.push(
        el('p', {},
           `The map shows ${data.facets.length} of the ${data.combinations.facets} respects in which cases differ. ` +
               `${count(all - missing.length)} of its ${plural(all, 'pair')} of values were drawn` +
               (missing.length ? '. Some of the others cannot be: no case has both.' : '.')),
        el('p', {}, combinationsText(data.combinations)),
        heatMap(data.facets, drawn));
    if (missing.length)
      content.push(
          el('details', {open: missing.length <= 24}, el('summary', {}, `${plural(missing.length, 'pair')} never drawn`),
             el('ul', {class: 'names'}, missing.map((name) => el('li', {}, name)))));
  }
  content.push(
      el('h3', {}, 'Single features'),
      never.length ? el('p', {}, tag(false, 'never'), ' ', never.map(([name]) => name).join(', ')) : '',
      el('details', {}, el('summary', {}, `${plural(features.length, 'feature')}, and the cases that had them`),
         el('ul', {class: 'names'}, features.map(([name, n]) => el('li', {}, `${name}: ${count(n)}`)))));
  section('coverage', 'What was covered', content);
}

function histogram(precision, bins) {
  const left = 8, step = 15, high = 130, most = Math.max(...bins), last = bins.length - 1;
  const bars = bins.map((n, i) => {
    const height = n ? Math.max(2, n / most * high) : 0;
    return svg(
        'g', {},
        svg('title', {},
            `${i === last ? `beyond ${data.tolerance}` : 'up to ' + rounded(data.tolerance * 2 ** ((i - last + 1) / 2))}: ${
                plural(n, 'case')}`),
        svg('rect',
            {x: left + i * step, y: 10 + high - height, width: step - 2, height, class: i === last ? 'bar beyond' : 'bar'}));
  });
  const marks = bins.map(
      (_, i) => (last - 1 - i) % 4 === 0 && i < last ?
          svg('text', {x: left + (i + 1) * step, y: high + 26, class: 'quiet', 'text-anchor': 'middle'},
              rounded(data.tolerance * 2 ** ((i - last + 1) / 2), 2)) :
          '');
  const total = bins.reduce((sum, n) => sum + n, 0), limit = left + last * step - 1;
  return el(
      'figure', {},
      scrolled(
          `Errors in ${precision}`,
          svg('svg', {
            role: 'img',
            width: left + bins.length * step + 8,
            height: high + 34,
            'aria-label': `${plural(total, 'case')} in ${precision}, ${count(bins[last])} of them beyond the tolerance`
          },
              svg('line', {x1: left, x2: left + bins.length * step, y1: 10 + high, y2: 10 + high, class: 'grid'}), bars, marks,
              svg('line', {x1: limit, x2: limit, y1: 0, y2: 10 + high, class: 'limit'}),
              svg('text', {x: limit - 5, y: 10, 'text-anchor': 'end'}, 'tolerance'))),
      el('figcaption', {},
         `${precision}: ${
             plural(total, 'case')} by their largest error, in units of what unsharded runs are off by themselves.`));
}

// A dot for each measurement, on a logarithmic axis.
function strip(kind, values) {
  const left = 24, wide = 290, low = -9, x = (value) => left + (Math.log10(Math.max(value, 1e-9)) - low) / -low * wide;
  const ordered = values.filter((value) => value !== null).sort((a, b) => a - b),
        middle = ordered[Math.floor(ordered.length / 2)];
  return el(
      'figure', {},
      scrolled(
          `Smallest errors found, ${kind}`,
          svg('svg', {
            role: 'img',
            width: left + wide + 16,
            height: 44,
            'aria-label': `from ${rounded(ordered[0], 2)} to ${rounded(ordered[ordered.length - 1], 2)}, in the middle ${
                rounded(middle, 2)}`
          },
              svg('line', {x1: left, x2: left + wide, y1: 14, y2: 14, class: 'grid'}),
              ordered.map(
                  (value) => svg(
                      'circle', {cx: x(Math.min(value, 1)), cy: 14, r: 5, class: 'dot'}, svg('title', {}, rounded(value, 2)))),
              [-9, -6, -3, 0].map(
                  (power) =>
                      svg('text', {x: left + (power - low) / -low * wide, y: 38, class: 'quiet', 'text-anchor': 'middle'},
                          power ? '1e' + power : '1')))),
      el('figcaption', {},
         `${kind}: ${rounded(ordered[0], 2)} to ${rounded(ordered[ordered.length - 1], 2)}, ${
             plural(ordered.length, 'case')}.`));
}

function showErrors() {
  const errors = Object.entries(data.errors),
        found = Object.entries(data.smallest_found).filter(([, values]) => values.some(Number.isFinite));
  section(
      'errors', 'Errors and the tolerance',
      el('p', {},
         `${plural(data.bitwise, 'case')} ${
             data.bitwise === 1 ? 'was' : 'were'} compared bit for bit, where no error is allowed. ` +
             `In fast mode a tensor may be ${data.tolerance} times as far from the float64 run as unsharded runs are.`),
      errors.length ? el('div', {class: 'charts'}, errors.map(([precision, bins]) => histogram(precision, bins))) : '',
      found.length ?
          [
            el('h3', {}, 'The smallest planted error that was still found'),
            el('p', {class: 'muted'},
               'In some cases one value was changed by a relative error, which was made smaller until the comparison missed it.'),
            el('div', {class: 'charts'}, found.map(([kind, values]) => strip(kind, values)))
          ] :
          '');
}

// How many of the bugs are found within so many cases.
function killCurve(rows) {
  const killed = rows.filter((row) => row.verdict === 'killed').map((row) => Math.max(1, row.cases)).sort((a, b) => a - b);
  const left = 40, top = 8, wide = 290, high = 180, most = Math.max(10, ...killed), power = Math.ceil(Math.log10(most));
  const x = (n) => left + Math.log10(n) / power * wide, y = (share) => top + (1 - share) * high;
  let path = `M ${x(1)} ${y(0)}`;
  killed.forEach((n, i) => { path += ` H ${x(n).toFixed(1)} V ${y((i + 1) / rows.length).toFixed(1)}`; });
  const middle = killed[Math.floor((killed.length - 1) / 2)];
  return el(
      'figure', {},
      scrolled(
          'Cases to find a bug',
          svg('svg', {
            role: 'img',
            width: left + wide + 20,
            height: high + 40,
            'aria-label':
                `${count(killed.length)} of ${count(rows.length)} found, half of these within ${plural(middle || 0, 'case')}`
          },
              [0, .25, .5, .75, 1].map(
                  (share) =>
                      [svg('line', {x1: left, x2: left + wide, y1: y(share), y2: y(share), class: 'grid'}),
                       svg('text', {x: left - 6, y: y(share) + 4, 'text-anchor': 'end', class: 'quiet'}, `${share * 100} %`)]),
              Array.from(
                  {length: power + 1},
                  (_, i) =>
                      svg('text', {x: x(10 ** i), y: high + 26, 'text-anchor': 'middle', class: 'quiet'}, count(10 ** i))),
              svg('path', {d: `${path} H ${left + wide}`, class: 'curve'}))),
      el('figcaption', {},
         `Bugs that verify looks for: the share found within so many cases.` +
             (middle ? ` Half of those found took at most ${plural(middle, 'case')}.` : '')));
}

function showFaults() {
  const rows = data.fault_rows;
  if (!rows.length) return;
  const killed = rows.filter((row) => row.verdict === 'killed').length,
        drawn = rows.filter((row) => row.check.startsWith('verify'));
  const kind = (row) => row.check.split(' ')[0];
  section(
      'faults', 'Planted bugs', el('p', {}, `${count(killed)} of ${plural(rows.length, 'planted bug')} were found.`),
      drawn.length ? killCurve(drawn) : '', pagedTable({
        label: 'Planted bugs',
        unit: 'bug',
        rows,
        text: (row) => Object.values(row).join(' '),
        columns: [
          {name: 'Bug', key: (row) => row.id, of: (row) => row.id},
          {name: 'What is planted', key: (row) => row.title, of: (row) => row.title},
          {name: 'Verdict', key: (row) => row.verdict, of: (row) => tag(row.verdict === 'killed', row.verdict)},
          {name: 'Check', optional: true, key: kind, of: kind}, {
            name: 'Found after',
            number: true,
            key: (row) => row.cases,
            of: (row) => (row.verdict === 'killed' ? plural(row.cases, kind(row) === 'verify' ? 'case' : 'test') : '')
          },
          {name: 'Seconds', optional: true, number: true, key: (row) => row.seconds, of: (row) => row.seconds.toFixed(0)}
        ],
        filters: [{name: 'Verdict', of: (row) => row.verdict}, {name: 'Check', of: kind}],
        detail: (row) => facts(
            ['from', row.from], ['check', el('code', {}, row.check)], ['found by', row.by], ['it looks as if', row.guess],
            ['minimal case', row.case && el('code', {}, row.case)])
      }));
}

showVerdict();
showFailures();
showCases();
showCoverage();
showErrors();
showFaults();
