// SPDX-License-Identifier: Apache-2.0

package record

import (
	"math"
	"math/bits"
	"time"

	"github.com/pdkit/pdkit/pdflow/decide"
)

// A list of candidates is packed by columns, since the figures of a column are alike. columnCount columns may be left
// out that have only zeros.
const columnCount = 12

// figure is a candidate's number of a column.
func figure(c *decide.Candidate, column int) int64 {
	switch column {
	case 0:
		return int64(c.Queue)
	case 1:
		return int64(c.QueueTokens)
	case 2:
		return int64(c.Running)
	case 3:
		return int64(c.Context)
	case 4:
		return int64(c.Coming)
	case 5:
		return int64(c.ComingContext)
	case 6:
		return int64(c.Moving)
	case 7:
		return int64(c.KV.Free)
	case 8:
		return int64(c.Cached)
	case 9:
		return int64(c.Age)
	case 10:
		return int64(math.Float64bits(c.Prefilled))
	}
	return int64(c.Apart)
}

func setFigure(c *decide.Candidate, column int, v int64) {
	switch column {
	case 0:
		c.Queue = int(v)
	case 1:
		c.QueueTokens = int(v)
	case 2:
		c.Running = int(v)
	case 3:
		c.Context = int(v)
	case 4:
		c.Coming = int(v)
	case 5:
		c.ComingContext = int(v)
	case 6:
		c.Moving = int(v)
	case 7:
		c.KV.Free = int(v)
	case 8:
		c.Cached = int(v)
	case 9:
		c.Age = time.Duration(v)
	case 10:
		c.Prefilled = math.Float64frombits(uint64(v))
	default:
		c.Apart = uint64(v)
	}
}

// short returns the code of a number, in the unit of its column. ok is false where that would not be exact.
func short(column int, v int64) (c uint64, ok bool) {
	switch column {
	case 9:
		if v%int64(ageUnit) != 0 {
			return 0, false
		}
		v /= int64(ageUnit)
	case 10:
		x := math.Float64frombits(uint64(v))
		if x != math.Trunc(x) || x < 0 || x > 1<<52 || v < 0 {
			return 0, false
		}
		v = int64(x)
	}
	if v < 0 {
		return 0, false
	}
	return code(uint64(v))
}

// long is what short made c of.
func long(column int, c uint64) int64 {
	v := int64(decode(c))
	switch column {
	case 9:
		v *= int64(ageUnit)
	case 10:
		v = int64(math.Float64bits(float64(v)))
	}
	return v
}

// candidates packs a list. Engines' numbers, speeds and sizes of memory are elsewhere.
func candidates(p *packer, list []decide.Candidate) {
	var there uint64
	for column := range columnCount {
		for i := range list {
			if figure(&list[i], column) != 0 {
				there |= 1 << column
			}
		}
	}
	p.bits(there, columnCount)
	for column := range columnCount {
		if there>>column&1 == 0 {
			continue
		}
		width := 0
		for i := range list {
			c, ok := short(column, figure(&list[i], column))
			if !ok {
				width = rawWidth
				break
			}
			width = max(width, bits.Len64(c))
		}
		p.bits(uint64(width), 4)
		for i := range list {
			v := figure(&list[i], column)
			if width == rawWidth {
				p.bits(uint64(v), 64)
				continue
			}
			c, _ := short(column, v)
			p.bits(c, width)
		}
	}
	for i := range list {
		p.bool(list[i].CachedExact)
		p.bool(list[i].Alone)
		p.bool(list[i].KV.Total != 0)
	}
}

// unpackCandidates reads what candidates has written. Each candidate has the memory that its engine's line tells.
func unpackCandidates(u *unpacker, list []decide.Candidate) {
	there := u.bits(columnCount)
	for column := range columnCount {
		if there>>column&1 == 0 {
			continue
		}
		width := int(u.bits(4))
		for i := range list {
			var v int64
			if width == rawWidth {
				v = int64(u.bits(64))
			} else {
				v = long(column, u.bits(width))
			}
			setFigure(&list[i], column, v)
		}
	}
	for i := range list {
		list[i].CachedExact, list[i].Alone = u.bool(), u.bool()
		if !u.bool() {
			list[i].KV.Total = 0
		}
	}
}
