/**
 * The panel of GraftLoRAEffect: what each block of each row does, from the node's `graft_effect` output, and a button that
 * writes the block weights into the rows of the linked LoRA Stack. The workflow keeps it as the property `graft effect`.
 */
import { el, short } from './dom.js'
import { addPanel, chain, fit, remember } from './editor.js'
import { changeRows } from './linked_stack.js'
import { t } from './texts.js'

const PROPERTY = 'graft effect'
const NAMED = 8 // bars at most that have room for their names
const percent = (share) => short(100 * share)

/** Give a LoRA Effect node its panel. */
export function addEffectPanel(node) {
  const content = el('div', { class: 'graft-content' })
  addPanel(node, 'effect', content)
  const show = () => {
    const found = node.properties?.[PROPERTY]
    const known = Array.isArray(found?.rows)
    content.replaceChildren(
      ...(known ? shown(node, found) : [hint(t('Run the node to see what each block does here.'))]),
    )
    requestAnimationFrame(() => node.graph && fit(node))
  }
  chain(node, 'onExecuted', (output) => {
    const found = output?.graft_effect?.[0]
    if (!found) return
    remember(node, PROPERTY, { stack: found.stack, rows: found.rows.map(kept) })
    show()
  })
  chain(node, 'onConfigure', show)
  show()
}

const hint = (text) => el('div', { class: 'graft-dim' }, text)

/** What the workflow keeps of a row: its numbers as exact as they are shown. */
function kept({ file, strength, whole, missed, after, blocks }) {
  const rounded = (value) => Number(value.toPrecision(4))
  const bars = blocks.map(({ name, effect, share, kept: isKept }) => [name, rounded(effect), rounded(share), isKept])
  return { file, strength, whole: rounded(whole), missed: rounded(missed), after, blocks: bars }
}

function shown(node, { stack, rows }) {
  const top = Math.max(0, ...rows.flatMap((row) => row.blocks.map(([, effect]) => effect)))
  const said = el('div', { class: 'graft-message', role: 'status', hidden: true })
  const write = () => {
    const changes = rows.map((row) => ({ blocks: row.after }))
    const { text, wrong } = changeRows(node, stack, changes)
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
      onclick: write,
    },
    t('Keep what matters'),
  )
  return [...rows.flatMap((row) => rowParts(row, top)), el('div', { class: 'graft-foot' }, button), said]
}

function rowParts(row, top) {
  const { file, strength, whole, blocks } = row
  const head = t('{file} at {strength}: {percent}% of the prediction', { file, strength, percent: percent(whole) })
  if (!whole) return [el('div', {}, head), hint(t('it changes nothing here'))]
  const label = t('Effect of each block of {file}', { file })
  const bars = blocks.map((block) => bar(block, top, blocks.length <= NAMED))
  return [
    el('div', { class: 'graft-file-text' }, head),
    el('div', { class: 'graft-bars', role: 'img', 'aria-label': label }, ...bars),
    hint(keptText(row)),
  ]
}

function bar([name, effect, share, isKept], top, isNamed) {
  const title = t('{block}: changes the prediction by {percent}%, {share}% of the sum', {
    block: name,
    percent: percent(effect),
    share: Math.round(100 * share),
  })
  const fill = el('i', {})
  fill.style.height = `${Math.round((isNamed ? 72 : 100) * (top ? effect / top : 0))}%`
  const label = isNamed ? el('span', {}, name) : null
  return el('div', { class: isKept ? 'graft-bar graft-kept' : 'graft-bar', title }, label, fill)
}

/** Which blocks are kept, in words. */
function keptText({ blocks, missed }) {
  const names = blocks.filter(([, , , isKept]) => isKept).map(([name]) => name)
  if (names.length === blocks.length) return t('All {count} blocks are needed.', { count: blocks.length })
  return t('Kept: {blocks}. They differ from all blocks by {percent}% of the change.', {
    blocks: names.join(', '),
    percent: Math.round(100 * missed),
  })
}
