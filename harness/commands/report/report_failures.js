function showVerdict() {
  const held = data.held, verdict = document.getElementById('verdict');
  const title = (data.interrupted ? 'Interrupted, so far ' : '') + (held ? 'All held' : 'Failed');
  document.title = `${title}: ${plural(data.cases, 'case')} of shardproof verify`;
  verdict.classList.toggle('failed', !held);
  const text = held ? `${plural(data.cases, 'case')} of sharded training gave what unsharded training gives.` :
      data.failures > 0 ? `${plural(data.failures, 'case')} of ${count(data.cases)} differed from unsharded training.` :
                          `The golden run differs from PyTorch in ${plural(data.oracle_differences, 'case')}.`;
  const figures = [
    ['cases', count(data.cases)], ['failures', count(data.failures)], ['values compared', count(data.values_compared)],
    ['time', duration(data.seconds)], ['cases a minute', count(Math.round(data.cases * 60 / Math.max(data.seconds, 1e-3)))]
  ];
  if (data.reports > 1) figures.push(['runs merged', count(data.reports)]);
  verdict.append(
      el('h1', {}, `${held ? '✓' : '✗'} ${title}`), el('p', {}, text),
      el('dl', {class: 'figures'}, figures.map(([name, value]) => el('div', {}, el('dt', {}, name), el('dd', {}, value)))));
}

// Who owns what: a box for each rank, laid out as the mesh, and in it a bar for each tensor.
function ownership(picture, wrongText) {
  const kinds = {parameter: 'parameters', state: 'gradients, main parameters and optimizer state'};
  const axes = picture.axes, ranks = axes.reduce((product, [, size]) => product * size, 1);
  const columns = axes.length ? axes[axes.length - 1][1] : 1;
  const where = (rank) => {
    let rest = rank;
    const coordinates = axes.slice().reverse().map(([name, size]) => {
      const text = `${name} ${rest % size}`;
      rest = Math.floor(rest / size);
      return text;
    });
    return coordinates.reverse().join(', ');
  };
  const mesh = el('div', {class: 'mesh', style: `grid-template-columns: repeat(${columns}, auto)`});
  const isWrong = (name) => wrongText.split(/[\s,:]+/).includes(name);
  function box(rank, kind) {
    const width = 168, step = 27;
    const picks = picture.tensors.map((tensor, i) => {
      const size = tensor.shape.reduce((product, n) => product * n, 1), runs = tensor[kind].ranks[rank];
      const held = runs.reduce((sum, [begin, end]) => sum + end - begin, 0), y = i * step;
      const most = isWrong(tensor.name) ? 20 : 26;
      const short = tensor.name.length > most ? '…' + tensor.name.slice(1 - most) : tensor.name;
      const title = `${tensor.name} of shape [${tensor.shape.join(', ')}], ${tensor[kind].layout}: rank ${rank} holds ` +
          (held ? `${held} of ${size} elements: ${runs.map(([begin, end]) => `${begin} to ${end - 1}`).join('; ')}` :
                  'nothing');
      return svg(
          'g', {}, svg('title', {}, title),
          svg('text', {x: 0, y: y + 11, class: isWrong(tensor.name) ? 'wrong' : null},
              isWrong(tensor.name) ? '≠ ' + short : short),
          runs.map(([begin, end]) => svg('rect', {
                     x: begin / size * width,
                     y: y + 15,
                     height: 8,
                     fill: colour(i),
                     width: Math.max((end - begin) / size * width, .5)
                   })),
          svg('rect', {x: .5, y: y + 14.5, width: width - 1, height: 9, class: 'frame'}));
    });
    const label =
        `Rank ${rank} holds parts of ${picture.tensors.filter((tensor) => tensor[kind].ranks[rank].length).length} of ` +
        plural(picture.tensors.length, 'tensor');
    return el(
        'div', {class: 'rank'}, el('h4', {}, `rank ${rank} `, el('small', {}, where(rank))),
        svg('svg', {role: 'img', 'aria-label': label, width, height: picture.tensors.length * step}, picks));
  }
  const show = (kind) => mesh.replaceChildren(...Array.from({length: ranks}, (_, rank) => box(rank, kind)));
  const name = 'kind-' + Math.random().toString(36).slice(2);
  show('parameter');
  return [
    el('h3', {}, 'Who owns what'),
    el('p', {class: 'muted'},
       'Each box is a rank. A bar is a tensor in row-major order; what is filled is held there between steps.' +
           (picture.tensors_left_out ? ` ${plural(picture.tensors_left_out, 'tensor')} left out.` : '')),
    el('fieldset', {class: 'choice'}, el('legend', {class: 'hidden'}, 'What is shown'),
       Object.entries(kinds).map(
           ([kind, label], i) =>
               el('label', {}, el('input', {type: 'radio', name, checked: i === 0, onchange: () => show(kind)}), label))),
    scrolled('Who owns what', mesh)
  ];
}

const kLetters = {
  all_gather: 'AG',
  reduce_scatter: 'RS',
  all_reduce: 'AR',
  all_to_all: 'AA',
  broadcast: 'BC',
  send: 'S',
  recv: 'R',
  barrier: 'B',
  split: 'SP'
};

// The collectives of a step: a line for each rank, and a column for each call.
function timeline(picture) {
  const calls = picture.calls.flatMap((own, rank) => own.map((call) => ({...call, rank})));
  if (!calls.length) return [el('h3', {}, 'Collectives of the step'), el('p', {class: 'muted'}, 'No rank called one.')];
  const ops = options(calls.map((call) => call.op)), left = 52, wide = 28, high = 26;
  const columns = 1 + calls.reduce((most, call) => Math.max(most, call.column), 0);
  const links = [], byColumn = new Map();
  for (const call of calls) {
    const key = `${call.column} ${call.group}`;
    if (!byColumn.has(key)) byColumn.set(key, []);
    byColumn.get(key).push(call.rank);
  }
  for (const [key, ranks] of byColumn) {
    const x = left + Number(key.split(' ')[0]) * wide + wide / 2;
    links.push(
        svg('line',
            {x1: x, x2: x, y1: Math.min(...ranks) * high + high / 2, y2: Math.max(...ranks) * high + high / 2, class: 'grid'}));
  }
  const boxes = calls.map(
      (call) =>
          svg('g', {},
              svg('title', {},
                  `rank ${call.rank}, call ${call.column + 1}: ${call.call} in ${call.group}, ${plural(call.bytes, 'byte')}` +
                      (call.differs ? '; others of its group call something else there' : '')),
              svg('rect', {
                x: left + call.column * wide + 2,
                y: call.rank * high + 3,
                width: wide - 4,
                height: high - 6,
                rx: 4,
                fill: colour(ops.indexOf(call.op)),
                class: call.differs ? 'apart' : null
              }),
              svg('text', {
                x: left + call.column * wide + wide / 2,
                y: call.rank * high + high / 2 + 4,
                'text-anchor': 'middle',
                style: 'fill: #fff; font-weight: 600'
              },
                  kLetters[call.op] || '?')));
  const labels = picture.calls.map((_, rank) => svg('text', {x: 0, y: rank * high + high / 2 + 4}, `rank ${rank}`));
  const apart = calls.filter((call) => call.differs);
  return [
    el('h3', {}, `Collectives of step ${picture.step + 1}, by rank`),
    el('p', {class: 'muted'},
       'From left to right in the order of calls; calls of one column belong together. This is an order and no time.' +
           (picture.calls_left_out ? ` ${plural(picture.calls_left_out, 'call')} left out.` : '')),
    apart.length ? el('p', {}, tag(false, 'ranks disagree'),
                      ` ${plural(apart.length, 'call')} with a thick border: ` +
                          'others of the group call something else there, or in another order.') :
                   '',
    el('ul', {class: 'legend'},
       ops.map((op, i) => el('li', {}, el('i', {style: `background: ${colour(i)}`}), `${kLetters[op] || '?'} ${op}`))),
    scrolled(
        'Collectives of the step, by rank',
        svg('svg', {
          role: 'img',
          width: left + columns * wide + 4,
          height: picture.calls.length * high,
          'aria-label':
              `${plural(calls.length, 'call')} of ${plural(picture.calls.length, 'rank')}; the list below has them as text`
        },
            links, boxes, labels)),
    el('details', {}, el('summary', {}, 'The same as a list'),
       picture.calls.map(
           (own, rank) =>
               [el('h4', {}, `rank ${rank}`),
                el('ol', {},
                   own.map((call) => el('li', {value: call.column + 1}, el('code', {}, `${call.call} in ${call.group}`))))]))
  ];
}

function showFailures() {
  if (!data.failure_rows.length && !data.oracle_rows.length) return;
  const articles = data.failure_rows.map(
      (failure) => el(
          'article', {}, el('h3', {class: 'what'}, failure.what),
          facts(
              ['where', failure.where], ['first module', failure.first], ['replicas', failure.replicas],
              ['it looks as if', failure.guess],
              ['minimal case', el('code', {}, failure.case)],
              ['replay', command(failure.replay)], ['alike', failure.alike],
              ['found', `after ${plural(failure.cases, 'case')}`],
              ['found as', failure.original && failure.original !== failure.case ? el('code', {}, failure.original) : '']),
          failure.picture ? [ownership(failure.picture, `${failure.what} ${failure.where || ''}`), timeline(failure.picture)] : ''));
  const oracle = data.oracle_rows.map(
      (row) =>
          el('article', {}, el('h3', {class: 'what'}, 'The golden run differs from PyTorch: ', row.what),
             facts(['case', el('code', {}, row.case)])));
  section('failures', 'Failures', articles, oracle);
}
