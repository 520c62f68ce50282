/**
 * The panel of GraftLoRAConflicts: the cosines of each pair of rows by block, from the node's `graft_conflicts` output, and a
 * button that writes the suggested block weights into the rows of the linked LoRA Stack. The workflow keeps it as the
 * property `graft conflicts`.
 */
import { el } from './dom.js'
import { addPanel, chain, fit, remember } from './editor.js'
import { changeRows } from './linked_stack.js'
import { t } from './texts.js'

const PROPERTY = 'graft conflicts'
const NAMED = 16 // columns at most that have room for their names
const SHOWN = 5 // conflicts in words
const COLORS = ['#d6453d', '#3b82f6'] // of negative and of positive cosines

/** Give a LoRA Conflicts node its panel. */
export function addConflictsPanel(node) {
  const content = el('div', { class: 'graft-content' })
  addPanel(node, 'conflicts', content)
  const show = () => {
    const found = node.properties?.[PROPERTY]
    const parts = Array.isArray(found?.pairs)
      ? shown(node, found)
      : [hint(t('Run the node to see where these LoRAs conflict.'))]
    content.replaceChildren(...parts)
    requestAnimationFrame(() => node.graph && fit(node))
  }
  chain(node, 'onExecuted', (output) => {
    const found = output?.graft_conflicts?.[0]
    if (!found) return
    const { stack, rows, blocks, fights, after, worst } = found
    remember(node, PROPERTY, { stack, rows, blocks, fights, after, worst, pairs: found.pairs.map(kept) })
    show()
  })
  chain(node, 'onConfigure', show)
  show()
}

const hint = (text) => el('div', { class: 'graft-dim' }, text)
const rounded = (value) => Number(value.toFixed(3))
const signed = (value) => `${value < 0 ? '-' : '+'}${Math.abs(value).toFixed(2)}`

/** What the workflow keeps of a pair: the cosine of each block. */
function kept({ rows, cosine, blocks }) {
  return { rows, cosine: rounded(cosine), blocks: blocks.map(([name, value]) => [name, rounded(value)]) }
}

function shown(node, found) {
  const { stack, rows, blocks, pairs, after } = found
  const names = rows.map(({ file, strength }, index) =>
    el('div', {}, t('{number}. {file} at {strength}', { number: index + 1, file, strength })),
  )
  const lines = pairs.map((pair) => line(pair, blocks))
  const heads =
    blocks.length <= NAMED ? [el('div', { class: 'graft-cells' }, ...blocks.map((name) => el('span', {}, name)))] : []
  const said = el('div', { class: 'graft-message', role: 'status', hidden: true })
  const take = () => {
    const { text, wrong } = changeRows(
      node,
      stack,
      after.map((weights) => ({ blocks: weights })),
    )
    said.textContent = text
    said.hidden = false
    said.classList.toggle('graft-problem', wrong)
    fit(node)
  }
  const button = el(
    'button',
    {
      class: 'graft-button',
      type: 'button',
      title: t('Write these block weights into the rows of the LoRA Stack'),
      onclick: take,
    },
    t('Take the suggestion'),
  )
  const foot = found.fights ? [...words(found), el('div', { class: 'graft-foot' }, button), said] : words(found)
  return [...names, ...heads.map((head) => beside('', head, '')), ...lines, ...foot]
}

const beside = (name, cells, value) =>
  el('div', { class: 'graft-pair' }, el('span', {}, name), cells, el('span', {}, value))

/** A pair: a cell for each block, red where they cancel and blue where they repeat each other. */
function line({ rows, cosine, blocks }, columns) {
  const [first, second] = rows.map((row) => row + 1)
  const name = t('{first} and {second}', { first, second })
  const known = new Map(blocks)
  const cells = columns.map((block) => {
    const value = known.get(block)
    const cell = el('i', { title: value === undefined ? block : `${block}: ${signed(value)}` })
    if (value !== undefined) {
      const share = Math.round(100 * Math.sqrt(Math.min(1, Math.abs(value))))
      cell.style.background = `color-mix(in srgb, ${COLORS[value < 0 ? 0 : 1]} ${share}%, transparent)`
    }
    return cell
  })
  const label = t('Cosines by block of rows {first} and {second}', { first, second })
  return beside(name, el('div', { class: 'graft-cells', role: 'img', 'aria-label': label }, ...cells), signed(cosine))
}

/** The strongest conflicts and the block weights that are suggested, in words. */
function words({ fights, worst, rows, after }) {
  if (!fights) return [hint(t('No two of these LoRAs conflict in any block.'))]
  const lines = worst.slice(0, SHOWN).map(([pair, block, cosine]) => {
    const [first, second] = pair.map((row) => row + 1)
    const values = { block, first, second, cosine: signed(cosine) }
    return cosine < 0
      ? t('{block}: rows {first} and {second} cancel ({cosine})', values)
      : t('{block}: rows {first} and {second} repeat each other ({cosine})', values)
  })
  if (fights > SHOWN) lines.push(t('{count} more in the report', { count: fights - SHOWN }))
  const weights = after.flatMap((text, index) =>
    text === rows[index].before ? [] : [t('Row {number}: {weights}', { number: index + 1, weights: text })],
  )
  return [...lines.map((text) => el('div', {}, text)), ...weights.map(hint)]
}
