/** A view over the whole page: a dialog that Escape, its button or a click beside it closes. */
import { el } from './dom.js'
import { t } from './texts.js'

/** Open a view with a title and content; `closed()` is called when it goes. Returns a function that closes it. */
export function openOverlay(title, content, closed) {
  const close = el(
    'button',
    { class: 'graft-icon', type: 'button', title: t('Close'), 'aria-label': t('Close'), onclick: () => dialog.close() },
    '✕',
  )
  const dialog = el(
    'dialog',
    { class: 'graft graft-overlay', 'aria-label': title },
    el('div', { class: 'graft-overlay-head' }, el('b', {}, title), close),
    el('div', { class: 'graft-overlay-body' }, content),
  )
  dialog.addEventListener('keydown', (event) => event.stopPropagation()) // the editor's own keys
  dialog.addEventListener('click', (event) => event.target === dialog && dialog.close())
  dialog.addEventListener('close', () => {
    dialog.remove()
    closed?.()
  })
  document.body.append(dialog)
  dialog.showModal()
  return () => dialog.close()
}
