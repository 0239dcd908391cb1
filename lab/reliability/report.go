// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/enginesim"
)

// printer writes lines of a report, beginning with its head.
func printer(w io.Writer, title, command string) func(format string, args ...any) {
	p := func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }
	p("# %s\n\n<!-- written by go run ./lab/reliability %s -->\n", title, command)
	return p
}

// must writes what is not as it must be.
func must(p func(string, ...any), err error) {
	if err != nil {
		p("\n**Not as it must be:**\n\n```\n%s\n```", err)
	}
}

// cells are the cells of a table with the counts of verdicts, and for refused requests with their codes.
func (t *tally) cells(verdicts ...string) string {
	var cells []string
	for _, verdict := range verdicts {
		if verdict == refused && len(t.codes) > 0 {
			cells = append(cells, codes(t.codes))
		} else {
			cells = append(cells, strconv.Itoa(t.count(verdict)))
		}
	}
	return strings.Join(cells, " | ")
}

// report writes a run as Markdown.
func (c *chaos) report(w io.Writer) {
	p := printer(w, "Chaos", "chaos")
	p("%s of faults on %d CPUs, seed %d. One gateway process serves all orders at once; behind it two prefill and two "+
		"decode engines of each, %d processes. Two faults at a time are played at each order while clients send "+
		"requests, streamed or not, over all APIs that the order carries. A request is tried at up to three pairs. "+
		"Each response is compared with that of an engine that serves alone.\n", c.took.Round(time.Second),
		runtime.NumCPU(), c.seed, 4*len(c.fleet.models))
	if c.fleet.decides {
		p("The seed is odd: requests stay at decode where that is predicted to be faster (`decision: predicted`), " +
			"and engines are picked by their KV-cache events (`-pick kv`).\n")
	}
	p("| order | legs | faults | requests | right | refused by code | cut, and told | cut as complete | left | wrong " +
		"| silently cut | hung | lost |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|")
	verdicts := []string{right, refused, cutAloud, cutAsDone, left, wrong, cutSilent, hung, lost}
	sum, faults := newTally(), 0
	for _, m := range c.fleet.models {
		t := c.tallies[m.name]
		played := 0
		for _, n := range c.faults[m.name] {
			played += n
		}
		p("| `%s` | %s | %d | %d | %s |", m.name, m.legs, played, t.all(), t.cells(verdicts...))
		for verdict, n := range t.verdicts {
			sum.verdicts[verdict] += n
		}
		faults += played
	}
	p("| all | | %d | %d | %s |\n", faults, sum.all(), sum.cells(verdicts...))
	p("*Refused* is an error response with a status and a code that names no engine. *Cut, and told*: decode died in " +
		"mid-stream, and the client saw its connection break, an error event or the finish reason `abort`. *Cut as " +
		"complete*: a decode engine that was told to end aborted the request, and its `/v1/responses` or " +
		"`/v1/messages` calls such a response complete, as vLLM 0.32 does: no gateway can tell. *Left*: the client " +
		"did. *Lost*: the connection ended without a response.\n")
	c.reportFaults(p)
	c.reportEnd(p)
}

// codes writes the codes of refused requests, most frequent first.
func codes(counts map[string]int) string {
	names := slices.SortedFunc(maps.Keys(counts), func(a, b string) int { return counts[b] - counts[a] })
	parts := make([]string, 0, len(names))
	for _, name := range names {
		parts = append(parts, fmt.Sprintf("%s: %d", name, counts[name]))
	}
	return strings.Join(parts, "; ")
}

func (c *chaos) reportFaults(p func(string, ...any)) {
	head, line := "| fault | what |", "|---|---|"
	for _, m := range c.fleet.models {
		head, line = head+" "+m.name+" |", line+"---|"
	}
	p("%s\n%s", head, line)
	for _, k := range faultKinds {
		row := []string{k.name, k.what}
		for _, m := range c.fleet.models {
			cell := strconv.Itoa(c.faults[m.name][k.name])
			if k.wire && c.fleet.wire == nil {
				cell = "not here"
			}
			if k.only != "" && k.only != m.name {
				cell = ""
			}
			row = append(row, cell)
		}
		p("| %s |", strings.Join(row, " | "))
	}
	p("\nFaults of packets are played in network namespaces, one for each engine, whose packets the program itself " +
		"carries. Without namespaces these faults are left out.\n")
}

func (c *chaos) reportEnd(p func(string, ...any)) {
	var sound []string
	for _, m := range c.fleet.models {
		again := "never"
		if took, ok := c.sound[m.name]; ok {
			again = fmt.Sprintf("%.1f s", took.Seconds())
		}
		sound = append(sound, m.name+" "+again)
	}
	p("After the faults each order served %d requests in a row rightly, within this time: %s. Held then:\n",
		soundRequests, strings.Join(sound, ", "))
	p("| gateway | before the faults | after them |\n|---|---|---|")
	p("| goroutines | %d | %d |", c.before.goroutines, c.after.goroutines)
	p("| file descriptors | %d | %d |", c.before.descriptors, c.after.descriptors)
	p("| sessions | %d | %d |", c.before.sessions, c.after.sessions)
	p("| heap in use | %s | %s |\n", mib(c.before.heap), mib(c.after.heap))
	p("| engines | prompt tokens taken over | read twice | read after the lease | another request's read " +
		"| prompts decode computed itself | leases that ended unread | blocks pinned, requests running " +
		"|\n|---|---|---|---|---|---|---|---|")
	for _, m := range c.fleet.models {
		all := state{}
		pinned, running := 0, 0
		for _, e := range m.engines {
			t := e.total()
			all = all.plus(t)
			pinned, running = pinned+t.Stats.PinnedBlocks, running+t.Stats.Running+t.Stats.Waiting
		}
		b := all.Breaches
		p("| `%s` | %d | %d | %d | %d | %d | %d | %d, %d |", m.name, all.Stats.ExternalKVTransfer,
			b[enginesim.KVDoubleUse], b[enginesim.KVStaleRead], b[enginesim.KVForeignRead], b[enginesim.KVNoTransfer],
			all.Stats.Expired, pinned, running)
	}
	p("\nA lease ends unread where an engine died, was cut off or froze between the legs, or a client left there. A "+
		"read after the lease was on its way while the link was cut: TCP delivers it up to 13 s later. Its request "+
		"was given up by then, since prefill, the handoff's age and decode's first byte may take 13 s together, and "+
		"the lease is %s: no response rests on it.", lease)
	must(p, c.err())
}

func mib(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }
