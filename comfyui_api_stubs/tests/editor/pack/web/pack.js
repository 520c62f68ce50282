export const pack = 1
