/** Block weights by sliders: one for each block that the file has layers in. */
import { el } from './dom.js'
import { t } from './texts.js'

const MOST = 2 // of a slider; other strengths are typed
const kindOf = (block) => (block === 'T5' ? block : block.replace(/\d+$/, '')) // T5 is a name, and no fifth block T

/**
 * The text of block weights, from [block, strength] pairs: "IN=0, OUT05=0.5". Blocks at 1 are left out, unless BASE, which
 * counts for every block without a strength of its own, has another.
 */
export function blockText(pairs) {
  const all = pairs.some(([block, value]) => block === 'BASE' && value !== 1)
  const kinds = new Map()
  for (const [block, value] of pairs) kinds.set(kindOf(block), [...(kinds.get(kindOf(block)) ?? []), [block, value]])
  const parts = [...kinds].flatMap(([kind, blocks]) => {
    const same = blocks.every(([, value]) => value === blocks[0][1])
    const named = same ? [[kind, blocks[0][1]]] : blocks
    return named.filter(([, value]) => all || value !== 1).map(([name, value]) => `${name}=${value}`)
  })
  return parts.join(', ')
}

/** Sliders for the [block, strength] pairs of a text; `change` is called with the new text. */
export function blockSliders(text, pairs, where, change) {
  const sliders = pairs.map(([block, value], index) => {
    const shown = el('output', { class: 'graft-slider-value' }, String(value))
    const input = el('input', {
      type: 'range',
      min: Math.min(0, value),
      max: Math.max(MOST, value),
      step: 0.05,
      'aria-label': t('{label} of {where}', { label: block, where }),
    })
    input.value = value
    input.addEventListener('input', () => (shown.textContent = String(input.valueAsNumber)))
    input.addEventListener('change', () => {
      pairs[index][1] = input.valueAsNumber
      change(blockText(pairs))
    })
    return el('label', { class: 'graft-slider' }, el('span', {}, block), input, shown)
  })
  return el(
    'div',
    { class: 'graft-blocks' },
    el('div', { class: 'graft-sliders', role: 'group', 'aria-label': t('Block weights') }, ...sliders),
    el(
      'button',
      {
        class: 'graft-button',
        type: 'button',
        hidden: !text,
        onclick: () => change(''),
      },
      t('All blocks at 1'),
    ),
  )
}
