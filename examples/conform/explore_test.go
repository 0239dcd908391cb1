package conform

import (
	"fmt"
	"os"
	"slices"
	"sort"
	"strings"
	"testing"
	"regexp"
)

func TestSlow(t *testing.T) {
	cases, _ := Select(nil)
	report, err := Run(t.Context(), gateway{os.Getenv("FAULT")}, cases, Options{Parallel: 12})
	if err != nil { t.Fatal(err) }
	sort.Slice(report.Results, func(i, j int) bool { return report.Results[i].Seconds > report.Results[j].Seconds })
	for _, r := range report.Results[:12] { fmt.Println(r.ID, r.Seconds, r.Verdict, r.Saw) }
}

func TestMatrix(t *testing.T) {
	src, _ := os.ReadFile("mutant_test.go")
	faults := []string{}
	for _, m := range regexp.MustCompile(`(?:p\.is\(|case |g\.fault == |\{)"([a-zA-Z][^"]* [^"]*)"`).FindAllStringSubmatch(string(src), -1) {
		if !slices.Contains(faults, m[1]) { faults = append(faults, m[1]) }
	}
	seen := map[string]bool{}
	for _, f := range faults {
		got := []string{}
		for id := range failures(t, gateway{f}) { got = append(got, id); seen[id] = true }
		slices.Sort(got)
		fmt.Printf("%q: {%q},\n", f, strings.Join(got, " "))
	}
	for _, c := range Cases() { if !seen[c.ID] { fmt.Println("NEVER", c.ID) } }
}
