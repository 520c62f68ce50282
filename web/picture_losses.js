/** What Picture Losses has measured, in the Dataset panel: the order of its pictures, what stands out, and what is left out. */
import { el, short } from './dom.js'
import { asked } from './editor.js'
import { t } from './texts.js'

const orMost = (value) => value ?? Infinity // no number, or not measured
// How two losses are ordered. A loss that is not a number counts as the highest, a caption that was not measured as a good one.
const ORDERS = {
  'by name': null,
  'highest loss first': (one, other) => orMost(other.after) - orMost(one.after) || 0,
  'least helped by the caption first': (one, other) => orMost(one.caption_help) - orMost(other.caption_help) || 0,
}

/** The losses of a folder's pictures by name, those whose caption is still the same; empty where none were measured. */
export async function lossesOf(folder, rows) {
  const { pictures } = await asked(`/graft/dataset/losses?folder=${encodeURIComponent(folder)}`)
  const captions = new Map(rows.map((row) => [row.name, row.varies ? null : row.caption]))
  const isSame = ([name, { caption }]) => captions.has(name) && (captions.get(name) ?? caption) === caption
  return new Map(Object.entries(pictures).filter(isSame))
}

/** Rows in an order; those without a loss last. */
export function inOrder(rows, order, losses) {
  const compare = ORDERS[order]
  if (!compare) return rows
  const measured = rows.filter((row) => losses.has(row.name))
  measured.sort((one, other) => compare(losses.get(one.name), losses.get(other.name)))
  return [...measured, ...rows.filter((row) => !losses.has(row.name))]
}

/** The choice of the order. */
export function orderChoice(order, choose) {
  const options = Object.keys(ORDERS).map((name) => el('option', { value: name, selected: name === order }, t(name)))
  const choice = el('select', { class: 'graft-order', 'aria-label': t('Order of the pictures') }, ...options)
  choice.addEventListener('change', () => choose(choice.value))
  return choice
}

/** What is said of a picture's loss below its name. */
export function lossLines({ before, after, caption_help: help, reasons }) {
  const facts = [t('loss {before} → {after}', { before: short(before), after: short(after) })]
  if (Number.isFinite(help)) facts.push(t('caption helps {percent}%', { percent: (100 * help).toFixed(1) }))
  return [
    el(
      'div',
      { class: 'graft-dim', title: t('before and after training, and what the caption lowers it by') },
      facts.join(', '),
    ),
    ...reasons.map((reason) => el('div', { class: 'graft-problem' }, reason)),
  ]
}

/** Filters (YAML) that leave out one more picture; null where they are written so that a person has to do it. */
export function leaveOut(filters, name) {
  const item = `- ${JSON.stringify(name)}`
  const lines = filters.split('\n')
  if (lines.some((line) => line.trim() && !/^([A-Za-z_]+:(\s|$)|\s|-|#)/.test(line))) return null
  const at = lines.findIndex((line) => line.startsWith('leave_out:'))
  if (at < 0) return [filters.trimEnd(), 'leave_out:', item].filter(Boolean).join('\n')
  if (lines[at].trimEnd() !== 'leave_out:') return null
  lines.splice(at + 1, 0, item)
  return lines.join('\n')
}
