// SPDX-License-Identifier: Apache-2.0

package states

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const matrixPage = "../../docs/reliability/faults.md"

// cell is one result.
type cell struct{ client, attempts, engines, always string }

// via is who asks.
type via struct {
	entrance string
	stream   bool
}

func (v via) String() string {
	if v.stream {
		return v.entrance + " stream"
	}
	return v.entrance + " whole"
}

// TestTheFaultMatrix holds the tables of docs/reliability/faults.md. PDKIT_UPDATE=1 writes them.
func TestTheFaultMatrix(t *testing.T) {
	var page strings.Builder
	total := 0
	for _, s := range scenarios {
		m := newMatrix(t, s)
		total += m.runs
		m.write(&page)
	}
	t.Logf("%d runs of the fault matrix", total)
	stated(t, "%s runs of the [fault matrix]", total)
	now := page.String() + fmt.Sprintf("\n%d runs.\n", total)
	if t.Failed() || !thorough {
		return
	}
	old, err := os.ReadFile(matrixPage)
	require.NoError(t, err)
	head, _, _ := strings.Cut(string(old), "## ")
	if now = head + now; os.Getenv("PDKIT_UPDATE") == "1" {
		require.NoError(t, os.WriteFile(matrixPage, []byte(now), 0o644))
		return
	}
	was, is := strings.Split(string(old), "\n"), strings.Split(now, "\n")
	for i := range min(len(was), len(is)) {
		if was[i] != is[i] {
			t.Fatalf("line %d of the page is\n%s\nand the flow does\n%s\nLook why, then write the page anew: "+
				"PDKIT_UPDATE=1 go test -run Matrix ./states", i+1, was[i], is[i])
		}
	}
	require.Len(t, was, len(is))
}

// matrix has the results of a scenario.
type matrix struct {
	scenario scenario
	cells    map[*event]map[string]map[via]cell // by event, phase and via
	phases   []string
	runs     int
}

func newMatrix(t *testing.T, s scenario) *matrix {
	m := &matrix{scenario: s, cells: map[*event]map[string]map[via]cell{}}
	for _, entrance := range entrances {
		for _, stream := range []bool{false, true} {
			if !thorough && (entrance != byHandler || !stream) {
				continue
			}
			m.add(t, via{entrance, stream})
		}
	}
	return m
}

// add runs one way in. The path goes to each point with P first.
func (m *matrix) add(t *testing.T, v via) {
	base := path{scenario: m.scenario, entrance: v.entrance, stream: v.stream, lead: prefillRole, coupled: true}
	calm, ok := run(t, base)
	if !ok {
		return
	}
	for i, state := range calm.states {
		for _, e := range state.possible {
			if strings.HasSuffix(e.name, "pass") { // which of several limits is the first may be chance
				continue
			}
			phase := state.waiting
			if e.role != "" {
				phase = e.pointIn(state.waiting)
			}
			if phase == "" {
				phase = "between"
			}
			if _, again := m.cells[e][phase][v]; again {
				continue
			}
			p := base
			p.moves = append(slices.Clone(calm.moves[:i]), e.move())
			once, _ := run(t, p)
			c := cell{client: once.result(), attempts: strconv.Itoa(once.attempts),
				engines: strings.Join(once.engines, "; ")}
			m.runs++
			if e.role != "" {
				p.repeats, p.within = e, e.atIn(phase)
				always, _ := run(t, p)
				c.always = always.result()
				m.runs++
			}
			m.put(e, phase, v, c)
		}
	}
}

func (m *matrix) put(e *event, phase string, v via, c cell) {
	if !slices.Contains(m.phases, phase) {
		m.phases = append(m.phases, phase)
	}
	if m.cells[e] == nil {
		m.cells[e] = map[string]map[via]cell{}
	}
	if m.cells[e][phase] == nil {
		m.cells[e][phase] = map[via]cell{}
	}
	m.cells[e][phase][v] = c
}

// pointIn returns the role and point of the leg that fails.
func (e *event) pointIn(waiting string) string {
	for name := range strings.SplitSeq(waiting, ", ") {
		if role, at, _ := strings.Cut(name, " "); role == e.role && slices.Contains(e.at, point(at)) {
			return name
		}
	}
	return ""
}

// atIn returns the point of a phase of an engine.
func (e *event) atIn(phase string) point {
	_, at, _ := strings.Cut(phase, " ")
	return point(at)
}

// result is what the client got, with the code of the last attempt's outcome.
func (r record) result() string {
	first, _, _ := strings.Cut(r.told, " ")
	if strings.HasPrefix(r.told, isCut) {
		first = isCut
	}
	if r.code == "" {
		return first
	}
	return first + " (" + string(r.code) + ")"
}

// write writes a scenario's table. Phases with equal results share a row.
func (m *matrix) write(page *strings.Builder) {
	fmt.Fprintf(page, "## %s\n\n| fault | at | via | client | attempts | engines | each time |\n", m.scenario.name)
	page.WriteString("|---|---|---|---|---|---|---|\n")
	type row struct {
		vias string
		c    cell
	}
	for _, e := range events {
		rows := map[row][]string{}
		var order []row
		for _, phase := range m.phases {
			by := map[cell][]string{}
			for _, v := range slices.SortedFunc(maps.Keys(m.cells[e][phase]), byName) {
				c := m.cells[e][phase][v]
				by[c] = append(by[c], v.String())
			}
			for c, vias := range by {
				r := row{vias: strings.Join(vias, ", "), c: c}
				if len(by) == 1 {
					r.vias = ""
				}
				if rows[r] == nil {
					order = append(order, r)
				}
				rows[r] = append(rows[r], phase)
			}
		}
		slices.SortStableFunc(order, func(a, b row) int {
			return strings.Compare(fmt.Sprint(slices.Index(m.phases, rows[a][0])+100, a.vias),
				fmt.Sprint(slices.Index(m.phases, rows[b][0])+100, b.vias))
		})
		for _, r := range order {
			fmt.Fprintf(page, "| %s | %s | %s | %s | %s | %s | %s |\n", strings.TrimSpace(e.role+" "+e.name),
				strings.Join(rows[r], " · "), r.vias, r.c.client, r.c.attempts, r.c.engines, r.c.always)
		}
	}
	page.WriteString("\n")
}

func byName(a, b via) int { return strings.Compare(a.String(), b.String()) }
