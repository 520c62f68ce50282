/** A number to type, step with the arrow keys, or drag sideways. */
import { el } from './dom.js'
import { setting } from './settings.js'
import { t } from './texts.js'

const PER_PIXEL = 0.01 // strength a pixel of dragging
const LIMIT = 100

/** The field of a strength; `take` is called with a new value, `current` gives the old one. */
export function strengthField(kind, label, current, take) {
  const input = el('input', {
    type: 'number',
    class: `graft-number ${kind}`,
    step: setting('Graft.LoRAStack.Step'),
    min: -LIMIT,
    max: LIMIT,
    value: String(current()),
    title: t('{label}: type, use the arrow keys, or drag', { label }),
    'aria-label': label,
  })
  const typed = () => {
    const value = input.valueAsNumber
    if (Number.isFinite(value) && Math.abs(value) <= LIMIT) take(Math.round(value * 1e4) / 1e4)
    else input.value = String(current())
  }
  input.addEventListener('change', typed)
  input.addEventListener('focus', () => input.select())
  input.addEventListener('pointerdown', (event) => {
    if (event.button !== 0 || document.activeElement === input) return
    event.preventDefault()
    const [start, first] = [event.clientX, current()]
    let dragged = false
    input.setPointerCapture(event.pointerId)
    const move = (to) => {
      const by = to.clientX - start
      if (!dragged && Math.abs(by) < 3) return
      dragged = true
      input.value = String(Math.round(Math.max(-LIMIT, Math.min(LIMIT, first + by * PER_PIXEL)) * 100) / 100)
    }
    const end = () => {
      input.removeEventListener('pointermove', move)
      input.removeEventListener('pointerup', end)
      input.removeEventListener('pointercancel', end)
      if (dragged) typed()
      else {
        input.focus()
        input.select()
      }
    }
    input.addEventListener('pointermove', move)
    input.addEventListener('pointerup', end)
    input.addEventListener('pointercancel', end)
  })
  return input
}
