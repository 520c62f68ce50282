/** Copying of text. */

/** Copy a text; false if the browser does not let it be. Over plain http there is no clipboard API, but a command. */
export async function copy(text) {
  if (window.isSecureContext && navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text)
      return true
    } catch {
      // the page may not use the clipboard: the command below may still be allowed
    }
  }
  const before = document.activeElement
  const area = document.createElement('textarea')
  area.value = text
  area.style.cssText = 'position: fixed; opacity: 0'
  document.body.append(area)
  area.select()
  const copied = document.execCommand('copy')
  area.remove()
  before?.focus?.()
  return copied
}
