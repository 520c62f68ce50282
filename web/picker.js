/** A list to choose a name from: search as you type, arrow keys and Enter, Escape closes. Fast with thousands of names. */
import { el } from './dom.js'
import { matching } from './rows.js'
import { t } from './texts.js'

const SHOWN = 200
let open = null

/** Close the list that is open, if one is. */
export function close() {
  open?.remove()
  open = null
}

/**
 * Open the list below an element; `choose` is called with the name taken. `words` are the list's own: {title, search,
 * none}, `query` is what it begins to search for, and note(name) is what stands behind a name.
 */
export function pick(anchor, names, chosen, choose, words) {
  close()
  let active = 0
  let found = []
  const list = el('div', { class: 'graft-picker-list', role: 'listbox', id: 'graft-picker-list' })
  const count = el('div', { class: 'graft-picker-count', 'aria-live': 'polite' })
  const search = el('input', {
    class: 'graft-picker-search',
    type: 'search',
    placeholder: words.search,
    'aria-label': words.search,
    value: words.query ?? '',
    role: 'combobox',
    'aria-expanded': 'true',
    'aria-controls': 'graft-picker-list',
    spellcheck: false,
  })
  const picker = el(
    'div',
    { class: 'graft-picker graft', role: 'dialog', 'aria-label': words.title },
    search,
    list,
    count,
  )

  const take = (name) => {
    close()
    choose(name)
  }
  const mark = () => {
    for (const [index, option] of [...list.children].entries()) {
      option.setAttribute('aria-selected', String(index === active))
    }
    const option = list.children[active]
    option?.scrollIntoView?.({ block: 'nearest' })
    search.setAttribute('aria-activedescendant', option ? option.id : '')
  }
  const show = () => {
    found = matching(names, search.value)
    active = Math.max(0, search.value ? 0 : found.slice(0, SHOWN).indexOf(chosen))
    list.replaceChildren(
      ...found.slice(0, SHOWN).map((name, index) =>
        el(
          'div',
          {
            class: 'graft-picker-option',
            role: 'option',
            id: `graft-option-${index}`,
            title: name,
            onclick: () => take(name),
          },
          el('span', {}, name),
          words.note ? el('span', { class: 'graft-dim' }, words.note(name)) : null,
        ),
      ),
    )
    const more = found.length - SHOWN
    const all = { count: found.length, all: names.length, more }
    const counted = more > 0 ? t('{count} of {all}; {more} more, type to narrow', all) : t('{count} of {all}', all)
    count.textContent = found.length ? counted : words.none
    mark()
  }
  search.addEventListener('input', show)
  picker.addEventListener('keydown', (event) => {
    event.stopPropagation()
    const last = Math.min(found.length, SHOWN) - 1
    if (event.key === 'ArrowDown') active = Math.min(last, active + 1)
    else if (event.key === 'ArrowUp') active = Math.max(0, active - 1)
    else if (event.key === 'PageDown') active = Math.min(last, active + 10)
    else if (event.key === 'PageUp') active = Math.max(0, active - 10)
    else if (event.key === 'Enter' && found[active]) {
      event.preventDefault()
      take(found[active])
      return
    } else if (event.key === 'Escape' || event.key === 'Tab') {
      event.preventDefault()
      close()
      anchor.focus()
      return
    } else return
    event.preventDefault()
    mark()
  })
  picker.addEventListener('focusout', (event) => {
    if (!picker.contains(event.relatedTarget)) {
      setTimeout(() => open === picker && !picker.contains(document.activeElement) && close(), 0)
    }
  })
  list.addEventListener('pointerdown', (event) => event.preventDefault()) // the search keeps the focus
  for (const name of ['wheel', 'pointerdown', 'contextmenu']) {
    picker.addEventListener(name, (event) => event.stopPropagation())
  }

  const place = anchor.getBoundingClientRect()
  const below = window.innerHeight - place.bottom
  picker.style.left = `${Math.max(4, Math.min(place.left, window.innerWidth - 364))}px`
  if (below > 240 || below > place.top) picker.style.top = `${place.bottom + 2}px`
  else picker.style.bottom = `${window.innerHeight - place.top + 2}px`
  document.body.append(picker)
  open = picker
  show()
  search.focus()
}
