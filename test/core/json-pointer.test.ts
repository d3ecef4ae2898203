import t from 'tap'
import { nodeAt, placesOf, pointerTokens } from '../../src/core/body/json-pointer.ts'

t.test('~1 and ~0 are undone in this order, everywhere in a token', async (t) => {
  t.same(pointerTokens('/~0~1~01~10/~1~1/~~0'), ['~/~1/0', '//', '~~'])
  t.same(pointerTokens('//a//'), ['', 'a', '', ''])
})

t.test('pointers share the places on their way, and name only their ends', async (t) => {
  const root = placesOf(['/a/b', '/a', '/a/0/x', '/é€'])
  const place = (pointer: string) => nodeAt(root, pointer)
  t.equal(place(''), root)
  for (const [pointer, isNamed] of [
    ['', false],
    ['/a', true],
    ['/a/b', true],
    ['/a/0', false],
    ['/a/0/x', true],
    ['/é€', true],
  ] as const)
    t.equal(place(pointer).isNamed, isNamed, pointer)
  t.same([...root.members.keys()], ['a', 'é€'])
  t.same([...root.lengths], [1, 5], 'bytes of UTF-8')
  t.equal(root.members.get('a')?.items.get(0), place('/a/0'))
  t.ok(placesOf(['']).isNamed)
  t.equal(placesOf([]).members.size, 0)
})

t.test('only a number as RFC 6901 spells it is an index', async (t) => {
  for (const [token, index] of [
    ['0', 0],
    ['7', 7],
    ['10', 10],
    ['123456', 123456],
  ] as const)
    t.same([...placesOf([`/${token}`]).items.keys()], [index])
  for (const token of ['', '-', '00', '01', '+1', '-1', '1.0', '1e0', ' 1', '1 ', 'a', 'a1', '1a'])
    t.equal(placesOf([`/${token}`]).items.size, 0, token)
})
