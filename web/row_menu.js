/** The menu of a LoRA row: right click, or the menu key. */
import { el } from './dom.js'
import { closePopup, openPopup } from './popup.js'
import { t } from './texts.js'

/** Open a menu of [label, act, off] entries; null is a line between them. */
export function openMenu(point, label, entries) {
  const items = entries.map((entry) => entry && item(...entry))
  const lines = items.map((one) => one ?? el('div', { class: 'graft-menu-line', role: 'separator' }))
  const menu = openPopup(point, { class: 'graft-menu', role: 'menu', 'aria-label': label }, ...lines)
  const usable = items.filter((one) => one && !one.disabled)
  menu.addEventListener('keydown', (event) => {
    const at = usable.indexOf(document.activeElement)
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: usable.length - 1 }[event.key]
    if (to === undefined) return
    event.preventDefault()
    usable[(to + usable.length) % usable.length]?.focus()
  })
  usable[0]?.focus()
}

function item(label, act, off = false) {
  const take = () => {
    closePopup(true)
    act()
  }
  return el(
    'button',
    { class: 'graft-menu-item', type: 'button', role: 'menuitem', disabled: off, onclick: take },
    label,
  )
}

/** The entries of a row's menu. */
export function rowEntries(panel, row) {
  const at = panel.rows.indexOf(row)
  const last = panel.rows.length - 1
  const folder = row.file.replaceAll('\\', '/').split('/').slice(0, -1).join('/')
  return [
    [t('Move up'), () => panel.move(row, at - 1), at === 0],
    [t('Move down'), () => panel.move(row, at + 1), at === last],
    [t('Move to the top'), () => panel.move(row, 0), at === 0],
    [t('Move to the bottom'), () => panel.move(row, last), at === last],
    null,
    [t('Duplicate'), () => panel.duplicate(row)],
    [panel.isSolo(row) ? t('End solo') : t('Solo: switch all other rows off'), () => panel.solo(row), last === 0],
    [t('Remove'), () => panel.remove(row)],
    null,
    [t('File info'), () => panel.unfold(panel.informed, row, '.graft-info-button')],
    [t('Copy trigger words'), () => panel.copyWords(row)],
    [t('Choose another file of this folder'), () => panel.choose(row, undefined, `${folder}/ `), !folder],
  ]
}
