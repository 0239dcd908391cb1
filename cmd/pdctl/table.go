// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
)

// column is one of a table: of each row its cell and that cell's colour.
type column struct {
	head    string
	right   bool // numbers are aligned at the right
	size    int
	cells   []string
	colours []string // nil: none
}

// texts is a column of words, at least as wide as its head, and at most so many characters.
func texts(head string, most int, cells []string) column {
	c := column{head: head, size: width(head), cells: cells}
	for i := range cells {
		cells[i] = plain(cells[i], most)
		c.size = max(c.size, width(cells[i]))
	}
	return c
}

// figures is a column of numbers, which stays as wide as it is while they change.
func figures(head string, size int, cells []string) column {
	return column{head: head, right: true, size: max(size, width(head)), cells: cells}
}

// named are the columns after a table's first one that are not in gone.
func named(columns []column, gone []string) []column {
	return slices.DeleteFunc(slices.Clone(columns), func(c column) bool { return slices.Contains(gone, c.head) })
}

func tableWidth(columns []column) (n int) {
	for _, c := range columns {
		n += 2 + c.size
	}
	return n
}

// fit makes columns as wide as the view: it leaves out those named in order, the first one first, as few as it can if
// the table's first column keeps at least so many characters.
func (v *view) fit(columns []column, least int, order []string) []column {
	first := columns[0]
	least = min(least, first.size)
	for n := range len(order) + 1 {
		rest := named(columns[1:], order[:n])
		if room := v.width - tableWidth(rest) - 2; room >= least || n == len(order) {
			first.size = max(min(first.size, room), 1)
			return append([]column{first}, rest...)
		}
	}
	return columns
}

// table draws columns that fit.
func (v *view) table(columns []column) []string {
	lines := make([]string, len(columns[0].cells)+1)
	for n, c := range columns {
		lines[0] += "  " + pad(plain(c.head, c.size), c.size, c.right)
		for i, cell := range c.cells {
			if cell = plain(cell, c.size); c.right || n < len(columns)-1 { // no spaces at the end of a line
				cell = pad(cell, c.size, c.right)
			}
			if c.colours != nil {
				cell = v.paint(cell, c.colours[i])
			}
			lines[i+1] += "  " + cell
		}
	}
	lines[0] = v.paint(strings.TrimRight(lines[0], " "), soft)
	return lines
}

// middle makes a text from the network safe, and cuts it in its middle: what tells engines apart, as a port does, is
// often at its end.
func middle(text string, n int) string {
	runes := []rune(plain(text, len(text)+1))
	if len(runes) <= n {
		return string(runes)
	}
	head := (n - 1) / 2
	return string(runes[:head]) + "…" + string(runes[len(runes)-max(n-1-head, 0):])
}

// count has at most five characters.
func count(n float64) string {
	switch {
	case !(n < 1e15):
		return "∞"
	case n >= 99.95e9:
		return fmt.Sprintf("%.0fG", n/1e9)
	case n >= 999.5e6:
		return fmt.Sprintf("%.1fG", n/1e9)
	case n >= 99.95e6:
		return fmt.Sprintf("%.0fM", n/1e6)
	case n >= 999.5e3:
		return fmt.Sprintf("%.1fM", n/1e6)
	case n >= 99.95e3:
		return fmt.Sprintf("%.0fk", n/1e3)
	case n >= 9999.5:
		return fmt.Sprintf("%.1fk", n/1e3)
	}
	return fmt.Sprintf("%.0f", n)
}
