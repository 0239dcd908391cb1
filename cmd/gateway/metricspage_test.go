// SPDX-License-Identifier: Apache-2.0

package main

import (
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"

	"go.uber.org/goleak"
)

const metricsPage = "../../docs/metrics.md"

// scraped is what the gateways of all tests have served at /metrics: it becomes the table of docs/metrics.md.
var scraped = struct {
	sync.Mutex
	metrics map[string]*scrapedMetric
}{metrics: map[string]*scrapedMetric{}}

type scrapedMetric struct {
	kind, help string
	labels     map[string]bool
}

// own are the labels that the page explains once for all metrics, and those of Prometheus.
var own = []string{"pd_connector", "gen_ai_request_model", "le"}

var (
	sampleLine = regexp.MustCompile(`^(pd_\w+?)(?:_bucket|_sum|_count)?(?:\{(.*)\})? \S+$`)
	labelName  = regexp.MustCompile(`(\w+)="`)
	labelInRow = regexp.MustCompile("`(\\w+)`")
)

// scrape notes the metrics of a gateway that is about to end.
func scrape(admin string) {
	resp, err := http.Get(admin + "/metrics")
	if err != nil {
		return // it has no admin address, or has ended by itself
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if err != nil {
		return
	}
	scraped.Lock()
	defer scraped.Unlock()
	for line := range strings.Lines(string(page)) {
		line = strings.TrimSpace(line)
		if word := strings.SplitN(line, " ", 4); len(word) == 4 && word[0] == "#" && strings.HasPrefix(word[2], "pd_") {
			m := scraped.metrics[word[2]]
			if m == nil {
				m = &scrapedMetric{labels: map[string]bool{}}
				scraped.metrics[word[2]] = m
			}
			if word[1] == "TYPE" {
				m.kind = word[3]
			} else {
				m.help = word[3]
			}
			continue
		}
		sample := sampleLine.FindStringSubmatch(line)
		if sample == nil {
			continue
		}
		m := scraped.metrics[sample[1]]
		if m == nil {
			m = scraped.metrics[strings.TrimSuffix(line[:strings.IndexAny(line, "{ ")], " ")]
		}
		for _, label := range labelName.FindAllStringSubmatch(sample[2], -1) {
			if m != nil && !slices.Contains(own, label[1]) {
				m.labels[label[1]] = true
			}
		}
	}
}

// table writes what was scraped. Labels that the page has already stay: some are seen only where an engine fails at the
// right moment.
func table(page string) string {
	scraped.Lock()
	defer scraped.Unlock()
	var b strings.Builder
	b.WriteString("| metric | type | labels | |\n|---|---|---|---|\n")
	for _, name := range slices.Sorted(maps.Keys(scraped.metrics)) {
		m := scraped.metrics[name]
		documented := regexp.MustCompile("(?m)^\\| `" + name + "` \\| \\w+ \\| (.*?) \\|")
		if row := documented.FindStringSubmatch(page); row != nil {
			for _, label := range labelInRow.FindAllStringSubmatch(row[1], -1) {
				m.labels[label[1]] = true
			}
		}
		labels := slices.Sorted(maps.Keys(m.labels))
		for i := range labels {
			labels[i] = "`" + labels[i] + "`"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", name, m.kind, strings.Join(labels, ", "), m.help)
	}
	return b.String()
}

const (
	tableBegin = "<!-- The table is written by PDKIT_UPDATE=1 go test ./gateway, in cmd. -->\n"
	tableEnd   = "<!-- end of the table -->\n"
)

// documented runs the tests. If all ran and passed, it compares the table of docs/metrics.md with what they saw.
type documented struct{ goleak.TestingM }

func (d documented) Run() int {
	code := d.TestingM.Run()
	for _, name := range []string{"test.run", "test.skip", "test.bench", "test.fuzz", "test.list"} {
		if f := flag.Lookup(name); f != nil && f.Value.String() != "" {
			return code
		}
	}
	if code != 0 {
		return code
	}
	page, err := os.ReadFile(metricsPage)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	before, rest, begun := strings.Cut(string(page), tableBegin)
	have, after, ended := strings.Cut(rest, tableEnd)
	want := table(have)
	if begun && ended && have == want {
		return 0
	}
	if os.Getenv("PDKIT_UPDATE") == "" || !begun || !ended {
		fmt.Fprintf(os.Stderr, "FAIL: %s is not what the gateways of the tests have served: PDKIT_UPDATE=1 writes it\n"+
			"want:\n%s\nhave:\n%s", metricsPage, want, have)
		return 1
	}
	page = []byte(before + tableBegin + want + tableEnd + after)
	if err := os.WriteFile(metricsPage, page, 0o644); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
