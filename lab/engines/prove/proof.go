// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/pdkit/pdkit/lab/internal/apis"
)

// row is one request of the proof: what the client got, and what it should get.
type row struct {
	question         question
	response         *response
	wrong            string // what differs from the response of one engine alone; "": nothing
	tokens           int    // prompt tokens that D took over from another engine
	bytes, wantBytes int    // bytes that NIXL moved, and should move
}

// reused reports whether D took over exactly the prompt, and NIXL moved exactly its blocks.
func (r row) reused() bool {
	return r.response.PromptTokens > 0 && r.tokens == r.response.PromptTokens && r.bytes == r.wantBytes
}

// proof has all rows, and what the engines counted during all of them.
type proof struct {
	rows     []row
	failed   int  // transfers and notifications that D counted as failed
	late     int  // handoffs that P counted as expired, or as read late or twice
	released bool // P holds no more blocks than before, long before the lease ends
}

// problems says what is not proven. It is empty if all is.
func (p proof) problems() []string {
	var problems []string
	texts := map[string]bool{}
	for _, r := range p.rows {
		texts[r.response.Text()] = true
		if r.wrong != "" {
			problems = append(problems, fmt.Sprintf("%s: the response is not that of one engine alone", r.question))
		}
		if !r.reused() {
			problems = append(
				problems, fmt.Sprintf("%s: the decode engine took over %d of %d prompt tokens, %d of %d bytes",
					r.question, r.tokens, r.response.PromptTokens, r.bytes, r.wantBytes))
		}
	}
	if len(texts) != len(p.rows) {
		problems = append(problems, "different prompts got the same text: comparing texts proves nothing")
	}
	if p.failed > 0 {
		problems = append(
			problems, fmt.Sprintf("the decode engine counted %d failed transfers or notifications", p.failed),
		)
	}
	if p.late > 0 {
		problems = append(
			problems, fmt.Sprintf("the prefill engine counted %d handoffs as expired or read late", p.late),
		)
	}
	if !p.released {
		problems = append(problems, "the prefill engine still holds blocks: nobody told it that they were read")
	}
	return problems
}

func (p proof) print(w io.Writer) {
	printRows(w, p.rows)
	fmt.Fprintf(w, "failed transfers or notifications: %d; handoffs expired or read late: %d; prefill engine's "+
		"blocks released: %t\n",
		p.failed, p.late, p.released)
}

func printRows(w io.Writer, rows []row) {
	table := newTable(w, "as one engine\tprompt tokens\ttaken over\tbytes moved\texpected")
	for _, r := range rows {
		equal := "yes"
		if r.wrong != "" {
			equal = "NO: " + r.wrong
		}
		table.row(r.question, r.response, equal, r.response.PromptTokens, r.tokens, r.bytes, r.wantBytes)
	}
	_ = table.Flush()
}

// table shows one line for each request: what the client got, and what the proof compares.
type table struct{ *tabwriter.Writer }

func newTable(w io.Writer, more string) table {
	t := table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
	fmt.Fprintln(t, "request\tstatus\tserved\tseconds\t"+more)
	return t
}

func (t table) row(q question, a *response, more ...any) {
	fmt.Fprintf(t, "%s\t%d\t%s\t%.2f", q, a.status, a.mode, a.took.Seconds())
	for _, cell := range more {
		fmt.Fprintf(t, "\t%v", cell)
	}
	fmt.Fprintln(t)
}

// prove shows a connector's proof. It returns errNotProven if there is a problem.
func prove(ctx context.Context, lab *lab, connector string, p, d *process) error {
	fmt.Printf("kvConnector.type %s: every response against one engine alone, and what the engines counted\n",
		connector)
	proof, err := collect(ctx, lab, connector, p, d)
	if err != nil {
		return err
	}
	proof.print(os.Stdout)
	problems := proof.problems()
	if len(problems) == 0 {
		fmt.Print("proven: both engines served each request, and no prompt was computed twice\n\n")
		return nil
	}
	fmt.Printf("no KV reuse is proven with connector %s:\n  - %s\n\n", connector, strings.Join(problems, "\n  - "))
	return errNotProven
}

// refute shows that the proof recognizes a gateway that moves no KV: the texts are the same, but D took nothing over.
func refute(ctx context.Context, lab *lab, p, d *process) error {
	fmt.Println("kvConnector.type http: the same answers, but the proof must find that no KV was reused")
	proof, err := collect(ctx, lab, "http", p, d)
	if err != nil {
		return err
	}
	proof.print(os.Stdout)
	for _, r := range proof.rows {
		if r.wrong != "" || r.tokens != 0 || r.bytes != 0 {
			fmt.Printf("%s: neither served as by one engine nor without KV reuse\n\n", r.question)
			return errNotProven
		}
	}
	if len(proof.problems()) < len(proof.rows) {
		fmt.Print("the proof has found nothing wrong: it proves nothing\n\n")
		return errNotProven
	}
	fmt.Print("found out, as it must be: right texts, nothing taken over\n\n")
	return nil
}

func collect(ctx context.Context, lab *lab, connector string, p, d *process) (proof, error) {
	gateway, err := lab.startGateway(
		ctx, gatewayOptions{connector: connector, prefills: []string{p.url}, decodes: []string{d.url}},
	)
	if err != nil {
		return proof{}, err
	}
	result, err := observe(ctx, gateway.url, p.url, d.url, 3*time.Second)
	return result, errors.Join(err, stopGateway(gateway))
}

// questions has a request of each API: with more and less than whole blocks, and with exactly two blocks.
func questions() []question {
	return []question{
		newQuestion(apis.Completions, false, 300, 32), newQuestion(apis.Completions, true, 64, 32),
		newQuestion(apis.Chat, false, 31, 32), newQuestion(apis.Chat, true, 500, 32),
		newQuestion(apis.Responses, false, 100, 32), newQuestion(apis.Messages, false, 101, 32),
		newQuestion(apis.Generate, false, 96, 32),
	}
}

// observe sends the requests of the proof one after the other, so that each request's share of the counters is known.
// patience is how much later than the response a counter may rise.
func observe(ctx context.Context, gateway, p, d string, patience time.Duration) (proof, error) {
	pBefore, err := readMetrics(ctx, p)
	if err != nil {
		return proof{}, fmt.Errorf("prefill engine: %w", err)
	}
	dBefore, err := readMetrics(ctx, d)
	if err != nil {
		return proof{}, fmt.Errorf("decode engine: %w", err)
	}
	cache, err := readCacheShape(dBefore)
	if err != nil {
		return proof{}, err
	}
	var result proof
	last := dBefore
	for _, q := range questions() {
		r := row{question: q, response: ask(ctx, gateway, q, nil)}
		r.wantBytes = (r.response.PromptTokens + cache.blockTokens - 1) / cache.blockTokens * cache.blockBytes
		reference, err := alone(ctx, p, q)
		if err != nil {
			return proof{}, err
		}
		if !r.response.right(reference) {
			r.wrong = "another text"
		}
		now, err := waitFor(ctx, d, patience, func(m metrics) bool {
			return rise(last, m, takenOver) >= r.response.PromptTokens && rise(last, m, bytesMoved) >= r.wantBytes
		})
		if err != nil {
			return proof{}, fmt.Errorf("decode engine: %w", err)
		}
		r.tokens, r.bytes = rise(last, now, takenOver), rise(last, now, bytesMoved)
		result.rows, last = append(result.rows, r), now
	}
	result.failed = rise(dBefore, last, failedReads) + rise(dBefore, last, failedNotices)
	pAfter, err := waitFor(ctx, p, patience, func(m metrics) bool { return m.sum(cacheUsed) <= pBefore.sum(cacheUsed) })
	if err != nil {
		return proof{}, fmt.Errorf("prefill engine: %w", err)
	}
	result.late = rise(pBefore, pAfter, expired) + rise(pBefore, pAfter, lateNotices)
	result.released = pAfter.sum(cacheUsed) <= pBefore.sum(cacheUsed)
	return result, nil
}

func rise(before, after metrics, s sample) int { return int(after.sum(s) - before.sum(s)) }

// cacheShape is the size of an engine's KV blocks.
type cacheShape struct{ blockTokens, blockBytes int }

// readCacheShape reads it from the labels of vllm:cache_config_info.
func readCacheShape(page metrics) (cacheShape, error) {
	for _, line := range page {
		if !strings.HasPrefix(line, "vllm:cache_config_info{") {
			continue
		}
		label := func(name string) int {
			_, rest, _ := strings.Cut(line, name+`="`)
			digits, _, _ := strings.Cut(rest, `"`)
			number, _ := strconv.Atoi(digits)
			return number
		}
		tokens, bytes, blocks := label(",block_size"), label(",kv_cache_memory_bytes"), label(",num_gpu_blocks")
		if tokens > 0 && bytes > 0 && blocks > 0 {
			return cacheShape{blockTokens: tokens, blockBytes: bytes / blocks}, nil
		}
	}
	return cacheShape{}, errors.New("the decode engine's metrics do not tell its block size")
}
