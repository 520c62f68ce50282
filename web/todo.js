/**
 * The panel of ApplyToDo: tokens of each depth before and after. The model's depths come from the node's last run (its
 * `graft_todo` output, kept in the workflow as a property). A changed setting or latent size shows at once.
 */
import { el, short } from './dom.js'
import { addPanel, api, chain, everyNode, fit, remember } from './editor.js'
import { latentOf, valueOf } from './latent_size.js'
import { t } from './texts.js'

const PROPERTY = 'graft tokens'
const SETTINGS = ['factor', 'max_depth', 'depth_factors', 'phase', 'start_percent', 'end_percent', 'disable_after']
const panels = new WeakMap()

/** Give an ApplyToDo node its panel. */
export function addTodoPanel(node) {
  const content = el('div', { class: 'graft-content' })
  addPanel(node, 'todo', content)
  let drawn = null
  const show = () => {
    const { depths, scale, kind, transformer } = node.properties?.[PROPERTY] ?? {}
    const latent = latentOf(node, 'latent')
    const known = [
      Array.isArray(depths) ? depths : null,
      factors(node),
      latent?.kind === kind ? scaled(latent, scale ?? 1) : latent,
      transformer,
      timing(node),
    ]
    const key = JSON.stringify(known)
    if (key === drawn) return
    drawn = key
    content.replaceChildren(...(known[0] ? table(...known) : unknown(known[2])))
    requestAnimationFrame(() => node.graph && fit(node))
  }
  panels.set(node, show)
  chain(node, 'onExecuted', (output) => {
    const found = output?.graft_todo?.[0]
    if (!found) return
    const latent = latentOf(node, 'latent') // an empty one may be sampled in another size, by its kind and the model
    const scale = latent && found.latent ? found.latent[0] / latent.height : 1
    remember(node, PROPERTY, {
      depths: found.depths,
      scale,
      kind: latent?.kind,
      transformer: found.transformer ?? undefined,
    })
    show()
  })
  chain(node, 'onConfigure', () => {
    show()
    requestAnimationFrame(show) // now its links are there
  })
  chain(node, 'onConnectionsChange', () => requestAnimationFrame(show))
  for (const widget of node.widgets ?? []) {
    if (SETTINGS.includes(widget.name)) {
      chain(widget, 'callback', () => requestAnimationFrame(show))
    }
  }
  show()
}

/** Follow the graph: a latent's size is changed at another node. Once. */
export function listen() {
  api.addEventListener('graphChanged', () => everyNode((node) => panels.get(node)?.()))
}

/** The factor of each depth from the node's inputs; null while these are not numbers or are computed by the graph. */
function factors(node) {
  const [text, most, factor] = ['depth_factors', 'max_depth', 'factor'].map((name) => valueOf(node, name))
  if (text === undefined) return null
  const listed = String(text)
    .split(/[\s,]+/)
    .filter(Boolean)
    .map(Number)
  const wanted = listed.length ? listed : repeated(Number(factor), most)
  return wanted.length && wanted.every((one) => one >= 1) ? wanted : null
}

/** When the node works, from its inputs; null while the graph computes one of them. */
function timing(node) {
  const phase = valueOf(node, 'phase')
  const [start, end, after] = ['start_percent', 'end_percent', 'disable_after'].map((name) =>
    Number(valueOf(node, name) ?? NaN),
  )
  return phase !== undefined && [start, end, after].every(Number.isFinite) ? { phase, start, end, after } : null
}

/** The share of sampling that is downsampled, and that of training; null if it depends on the run's length. */
function shares({ phase, start, end, after }) {
  const training = after >= 1 ? null : after || 1
  return {
    sampling: phase === 'training' ? 0 : end - start,
    training: phase === 'sampling' ? 0 : training,
  }
}

const repeated = (factor, times) => (times >= 1 ? Array(Number(times)).fill(factor) : [])

/** A latent in the size that the host samples it in, which the last run told. */
function scaled(latent, scale) {
  return latent && { ...latent, height: Math.round(latent.height * scale), width: Math.round(latent.width * scale) }
}

function unknown(latent) {
  const said = t('Run the workflow once to see the tokens by depth here.')
  return [el('div', { class: 'graft-dim' }, latent ? `${sizeOf(latent)} ${said}` : said)]
}

const sizeOf = ({ height, width, frames }) =>
  frames > 1
    ? t('The latent has {frames} frames of {height}×{width}.', { frames, height, width })
    : t('The latent is {height}×{width}.', { height, width })

/** Grid and frames of a depth: for the latent that is connected, else as they were when the node ran. */
function grid(row, latent) {
  if (latent && row.cell) {
    return { sides: [latent.height, latent.width].map((side) => Math.ceil(side / row.cell)), frames: latent.frames }
  }
  return { sides: row.before, frames: row.frames ?? 1 }
}

function table(depths, given, latent, transformer, when) {
  const counted = depths.map((row) => counts(row, given?.[row.depth - 1] ?? 1, latent))
  const heads = [t('depth'), t('factor'), t('tokens'), t('keys and values'), t('blocks')]
  const element = el(
    'table',
    { class: 'graft-table', 'aria-label': t('Tokens by depth') },
    el('thead', {}, el('tr', {}, ...heads.map((head) => el('th', { scope: 'col' }, head)))),
    el('tbody', {}, ...counted.map((count) => tableRow(count, Boolean(given)))),
  )
  const words = [basis(latent, depths), ...(given ? savedWords(counted, transformer, when) : [])]
  return [element, el('div', { class: 'graft-dim' }, words.filter(Boolean).join(' '))]
}

/** A depth's tokens before and after (null if its size is not known), and its thinned and untouched blocks. */
function counts(row, factor, latent) {
  const { sides, frames } = grid(row, latent)
  const after = sides?.map((side) => Math.max(1, Math.floor(side / factor + 1e-9)))
  const [before, left] = [sides, after].map((one) => (one ? frames * one[0] * one[1] : null))
  const thinned = row.own ?? (row.patched || row.skipped) // `own` is not in workflows of before
  const others = row.patched + row.skipped - thinned
  return { depth: row.depth, factor, width: row.width ?? 1, sides, after, before, left, thinned, others }
}

function tableRow({ depth, factor, sides, after, before, left, thinned, others }, isGiven) {
  const isKnown = before !== null
  return el(
    'tr',
    {},
    el('td', {}, String(depth)),
    el('td', {}, isGiven ? short(factor) : '–'),
    el('td', {}, isKnown ? `${before} (${sides.join('×')})` : '–'),
    el('td', {}, isKnown && isGiven ? `${left} (${after.join('×')})` : '–'),
    el('td', {}, others ? t('{count}, {left} unchanged', { count: thinned, left: others }) : String(thinned)),
  )
}

/** How much of the self-attention is saved over all depths whose size is known, and when; nothing when none is. */
function savedWords(counted, transformer, when) {
  let [all, kept] = [0, 0]
  for (const { width, before, left, thinned, others } of counted) {
    if (before === null) continue
    all += width * (thinned + others) * before * before
    kept += width * (thinned * before * left + others * before * before)
  }
  if (!all) return []
  const saved = 1 - kept / all
  if (!when) return [savedText(saved, transformer, true)]
  const { sampling, training } = shares(when)
  if (!sampling && training === 0) return [t('Saves nothing: no step is downsampled.'), ...whenWords(when, saved)]
  const isAlways = sampling === 1 && training === 1
  return [savedText(saved, transformer, !isAlways && saved > 0), ...whenWords(when, saved)]
}

function savedText(saved, transformer, isPartly) {
  const percent = percentOf(saved)
  if (isPartly && transformer) {
    return t(
      'Saves about {percent}% of the self-attention multiplications between image tokens in each step that it works in.',
      { percent },
    )
  }
  if (isPartly) {
    return t('Saves about {percent}% of the self-attention multiplications in each step that it works in.', { percent })
  }
  if (transformer) {
    return t('Saves about {percent}% of the self-attention multiplications between image tokens.', { percent })
  }
  return t('Saves about {percent}% of the self-attention multiplications.', { percent })
}

const percentOf = (share) => Math.round(100 * share)

/** When it works, where that is not always: as the node's report says it. */
function whenWords(when, saved) {
  const { sampling, training } = shares(when)
  const words = []
  if (when.phase === 'training') words.push(t('Sampling is never downsampled.'))
  else if (when.start === 1) words.push(t('Sampling is never downsampled: start is 1.'))
  else if (when.start === when.end) {
    words.push(t('Sampling is downsampled in one step at most: start and end are the same.'))
  } else if (sampling !== 1) {
    words.push(
      t('Sampling is downsampled from {start}% to {end}%: about {percent}% saved over all of it.', {
        start: short(100 * when.start),
        end: short(100 * when.end),
        percent: percentOf(sampling * saved),
      }),
    )
  }
  if (when.phase === 'sampling') words.push(t('Training is never downsampled.'))
  else if (training === null) words.push(t('Off after {steps} training steps.', { steps: when.after }))
  else if (training !== 1) {
    words.push(
      t('Off after {share}% of the training run: about {percent}% saved over all of it.', {
        share: short(100 * training),
        percent: percentOf(training * saved),
      }),
    )
  }
  return words
}

/** Which latent the token counts are for. */
function basis(latent, depths) {
  if (latent) return sizeOf(latent)
  if (depths[0]?.before) return t('For the latent of the last run.')
  return t('Connect a latent to see its tokens.')
}
