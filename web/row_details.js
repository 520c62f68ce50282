/** What a LoRA row has beside file and strengths: block weights with their sliders, schedule, partial match. */
import { blockSliders } from './block_sliders.js'
import { el } from './dom.js'
import * as files from './lora_files.js'
import { t } from './texts.js'

/** The unfolded part of a row; `set(name, value)` changes the row, `filled` is called when its size changes. */
export function details(row, where, set, filled) {
  const blocks = field(row, where, set, 'blocks', t('Block weights'), t('1,0,0.5,… or IN=0, OUT05=0.5'))
  const schedule = field(row, where, set, 'schedule', t('Schedule'), t('0.2-0.8, or 0:1, 0.5:0.3, 1:0'))
  const sliders = el('div', {})
  const draw = async () => {
    const { blocks: pairs } = await files.rowCheck(row).catch(() => ({ blocks: [] })) // the row's note says why
    const held = document.activeElement?.closest?.('.graft-slider')
    const at = held && sliders.contains(held) ? [...held.parentElement.children].indexOf(held) : -1
    const change = (text) => {
      set('blocks', text)
      blocks.querySelector('input').value = text
      draw()
    }
    const own = pairs.map((pair) => [...pair]) // the answer is kept: it must not change with the sliders
    sliders.replaceChildren(...(own.length > 1 ? [blockSliders(row.blocks, own, where, change)] : []))
    if (at >= 0) sliders.querySelectorAll('.graft-slider input')[at]?.focus()
    filled()
  }
  blocks.querySelector('input').addEventListener('change', draw)
  draw()
  return el('div', { class: 'graft-fold' }, blocks, sliders, schedule, partialMatch(row, where, set))
}

function field(row, where, set, name, label, placeholder) {
  const input = el('input', {
    type: 'text',
    class: `graft-text graft-text-${name}`,
    value: row[name],
    placeholder,
    'aria-label': t('{label} of {where}', { label, where }),
    spellcheck: false,
  })
  input.addEventListener('change', () => set(name, input.value.trim()))
  return el('label', { class: 'graft-field' }, el('span', {}, label), input)
}

function partialMatch(row, where, set) {
  const partial = el('input', {
    type: 'checkbox',
    checked: row.partial,
    'aria-label': t('Apply {where} even if only some of its layers fit', { where }),
  })
  partial.addEventListener('change', () => set('partial', partial.checked))
  return el(
    'label',
    { class: 'graft-field' },
    el('span', {}, t('Partial match')),
    partial,
    el('span', { class: 'graft-hint' }, t('apply the layers that fit, even if the LoRA was made for another model')),
  )
}
