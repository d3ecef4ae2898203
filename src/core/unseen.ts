/** C0, DEL, C1, and what turns the direction of a line: a terminal would obey them. */
const UNSEEN = /[\p{Cc}\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/gu

/** The text with everything written out that a terminal would not show, or obey. */
export function withoutUnseen(text: string): string {
  return text.replace(UNSEEN, escaped)
}

function escaped(character: string): string {
  return `\\u${character.charCodeAt(0).toString(16).padStart(4, '0')}`
}
