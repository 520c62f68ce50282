/** Names of multi-line fields: the classic canvas draws no label beside them, and hints at the input's id while they are empty. */

/** Give a node's multi-line fields their labels: as the hint of an empty field, for the pointer and for screen readers. */
export function labelFields(node) {
  for (const { element, label } of node.widgets ?? []) {
    if (element?.tagName !== 'TEXTAREA' || !label) continue
    element.classList.add('graft-named')
    Object.assign(element, { placeholder: label, title: label, ariaLabel: label })
  }
}
