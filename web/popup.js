/** A box over the page: closed by Escape, by a click beside it, and by the next one that opens. */
import { el } from './dom.js'

let open = null

/** Close the box that is open, if one is; `back` gives the focus to what had it. */
export function closePopup(back = false) {
  if (!open) return
  const { box, before, outside } = open
  open = null
  document.removeEventListener('pointerdown', outside, true)
  box.remove()
  if (back) before?.focus?.()
}

/** Open a box at a point of the page, moved so that all of it is on the page. */
export function openPopup({ x, y }, properties, ...children) {
  closePopup()
  const box = el('div', { ...properties, class: `graft graft-popup ${properties.class ?? ''}` }, ...children)
  const outside = (event) => box.contains(event.target) || closePopup()
  open = { box, before: document.activeElement, outside }
  document.addEventListener('pointerdown', outside, true)
  box.addEventListener('keydown', (event) => {
    event.stopPropagation()
    if (event.key === 'Escape') closePopup(true)
  })
  for (const name of ['wheel', 'pointerdown', 'contextmenu']) {
    box.addEventListener(name, (event) => event.stopPropagation())
  }
  document.body.append(box)
  place(box, x, y)
  return box
}

/** Put a box at a point, or as near as the page has room for it. */
export function place(box, x, y) {
  box.style.left = `${Math.max(4, Math.min(x, window.innerWidth - box.offsetWidth - 4))}px`
  box.style.top = `${Math.max(4, Math.min(y, window.innerHeight - box.offsetHeight - 4))}px`
}
