// SPDX-License-Identifier: Apache-2.0

package reuse

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/pdflow"
)

// Target says what [Verify] checks.
type Target struct {
	Ask Asker // sends a request to the pair as a client does: [Gateway] or [Flow]
	// the connector that should move the KV; nil if unknown, and then the reasons are general
	Connector connector.KVConnector
	Prefill   []string // base URLs of all prefill engines that Ask may use: http://host:port
	Decode    []string // base URLs of the decode engines
	Model     string   // may be "" if the gateway serves one model
	// Alone is the base URL of an engine that serves whole requests, for comparing texts. If it is "", Verify uses an
	// engine of the pair, if the protocol lets one serve alone. If a whole request would end a prefill engine
	// (PrefillPairOnly of [connector.Traits]), Alone must not be one of Prefill.
	Alone string
	// Client reads metrics and sends requests to Alone; nil means a client of Verify's own.
	Client *http.Client
}

// Options are the settings of [Verify]. The zero value means the defaults.
type Options struct {
	Probes    int           // how many synthetic probes, one after the other; default 3
	Tokens    int           // of each prompt, approximately; default 600, which is more than two chunks of every store
	MaxTokens int           // of each response; default 16
	Patience  time.Duration // how long Verify waits for counters after a response; default 3 s
	SkipText  bool          // do not compare texts
}

func (o Options) withDefaults() Options {
	o.Probes = cmp.Or(max(o.Probes, 0), 3)
	o.Tokens = cmp.Or(max(o.Tokens, 0), 600)
	o.MaxTokens = cmp.Or(max(o.MaxTokens, 0), 16)
	o.Patience = cmp.Or(max(o.Patience, 0), 3*time.Second)
	return o
}

// bases returns the URLs without a slash at their ends.
func bases(urls []string) []string {
	out := make([]string, len(urls))
	for i, u := range urls {
		out[i] = strings.TrimSuffix(u, "/")
	}
	return out
}

// traits are the connector's; none if that is unknown.
func (t *Target) traits() (traits connector.Traits) {
	if t.Connector != nil {
		traits = t.Connector.Traits()
	}
	return traits
}

// verification is one run of [Verify].
type verification struct {
	Target
	Options
	client *http.Client
	report *Report
	chunk  int64 // the size of D's blocks, in tokens
	// records is true if D is TensorRT-LLM, which has records in place of counters. taken is the sum of the records so
	// far, by role.
	records bool
	taken   delta
	foreign bool // P is not vLLM: it has none of vLLM's counters
	old     bool // D is a vLLM that does not count where prompt tokens come from
	sglang  bool // D is SGLang
	alone   bool // an SGLang decode engine computes prompts itself
}

// Verify sends synthetic probes and judges the outcome. It takes some seconds. It returns an error if nothing can be
// judged: an engine without metrics, no response at all, or the end of ctx. Faults of the pair are in the report. Other
// traffic on the same engines makes the figures inexact; then [Report.Disturbed] is true.
func Verify(ctx context.Context, t Target, o Options) (*Report, error) {
	if t.Ask == nil || len(t.Prefill) == 0 || len(t.Decode) == 0 {
		return nil, errors.New("reuse: a target needs a way to ask, and the addresses of its prefill and " +
			"decode engines")
	}
	t.Prefill, t.Decode = bases(t.Prefill), bases(t.Decode)
	t.Alone = strings.TrimSuffix(t.Alone, "/")
	if t.traits().Serving.PrefillPairOnly && slices.Contains(t.Prefill, t.Alone) {
		return nil, errors.New("reuse: the engine that is to be asked alone is a prefill engine, which a request " +
			"without a decode engine ends: name another")
	}
	v := &verification{Target: t, Options: o.withDefaults(), client: t.Client,
		report: &Report{Model: t.Model, Connector: t.traits().Name}}
	if v.client == nil {
		own := &http.Transport{DisableKeepAlives: true} // so that no connection is left afterwards
		v.client = &http.Client{Transport: own, Timeout: 60 * time.Second,
			// an engine must not redirect it
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	}
	if err := v.run(ctx); err != nil {
		return nil, fmt.Errorf("reuse: %w", err)
	}
	v.report.judge(v)
	return v.report, nil
}

func (v *verification) run(ctx context.Context) error {
	if err := v.look(ctx); err != nil {
		return err
	}
	tokens := v.fit(ctx)
	for range v.Probes {
		if err := v.probe(ctx, tokens); err != nil {
			if v.failed() && ctx.Err() == nil {
				break // what failed a synthetic probe may have ended an engine: that probe is the evidence
			}
			return err
		}
	}
	return v.compare(ctx)
}

// failed says whether a synthetic probe was answered with an error.
func (v *verification) failed() bool {
	return slices.ContainsFunc(v.report.Probes, func(p SyntheticProbe) bool { return p.Status != http.StatusOK })
}

// look finds out which counters the engines have.
func (v *verification) look(ctx context.Context) error {
	first, err := v.page(ctx, v.Decode[0])
	if err != nil {
		return fmt.Errorf("decode engine: %w", err)
	}
	v.report.metrics, v.old = first.bySource(), first.by("vllm:") && !first.bySource()
	v.chunk = first.label("vllm:cache_config_info", "block_size")
	if other, err := v.page(ctx, v.Prefill[0]); err == nil {
		v.foreign = !other.by("vllm:")
	}
	if v.report.metrics {
		return nil
	}
	v.sglang = first.by("sglang:") || v.report.Connector == "sglang"
	if v.sglang {
		v.alone = slices.ContainsFunc(v.Decode, func(engine string) bool { return servesAlone(ctx, v.client, engine) })
	}
	if v.sglang || v.traits().Serving.PairOnly {
		return nil
	}
	if _, ok, err := records(ctx, v.client, v.Decode[0]); err == nil && ok {
		v.records, v.report.metrics = true, true
		v.taken = delta{counts{}, counts{}}
		return nil
	}
	return errors.New("the decode engine's /metrics page does not tell where prompts come from " +
		"(vllm:prompt_tokens_by_source_total): nothing can be proven")
}

// page reads an engine's counters. Engines that cannot compute a prompt may have no page, since their responses are
// proof enough.
func (v *verification) page(ctx context.Context, engine string) (page, error) {
	pg, err := readPage(ctx, v.client, engine)
	if _, ok := errors.AsType[noPage](err); ok && v.traits().Serving.PairOnly {
		return nil, nil
	}
	return pg, err
}

// fit returns the number of tokens per prompt, at most what the model can hold.
func (v *verification) fit(ctx context.Context) int {
	var list struct {
		Data []struct {
			ID  string `json:"id"`
			Max int    `json:"max_model_len"`
		} `json:"data"`
	}
	if readJSON(ctx, v.client, http.MethodGet, v.Decode[0], "/v1/models", nil, &list) != nil {
		return v.Tokens
	}
	for _, m := range list.Data {
		if m.Max > 2*v.MaxTokens && (m.ID == v.Model || v.Model == "") {
			return min(v.Tokens, m.Max-2*v.MaxTokens)
		}
	}
	return v.Tokens
}

// probe sends one synthetic probe and waits until the engines have counted it.
func (v *verification) probe(ctx context.Context, tokens int) error {
	prompt := sizedPrompt(ctx, v.client, v.Prefill[0], v.Model, tokens)
	before, err := v.counts(ctx)
	if err != nil {
		return err
	}
	result, err := ask(ctx, v.Ask, completion(v.Model, prompt, v.MaxTokens, ""))
	if err != nil {
		return fmt.Errorf("a synthetic probe got no response: %w", err)
	}
	result.prompt = prompt
	d, err := v.settle(ctx, before, &result)
	if err != nil {
		return err
	}
	r := v.report
	result.Bytes = d.bytes()
	if result.Status == http.StatusOK {
		if err := v.share(d, &result); err != nil {
			return err
		}
	}
	r.Probes = append(r.Probes, result)
	r.PromptTokens += result.PromptTokens
	r.Reused += result.Reused
	r.Bytes += result.Bytes
	r.evidence.add(d)
	return nil
}

// share computes how many of a synthetic probe's prompt tokens decode took over.
func (v *verification) share(d delta, probe *SyntheticProbe) error {
	over, all := d.decode[takenOver], d.decode[promptTokens]
	switch {
	case v.records:
		if over, all = d.decode[recordedMoved], d.decode[recorded]; all == 0 {
			return errors.New("the decode engine's /perf_metrics holds no record of the synthetic probe, so nothing " +
				"can be proven: it needs return_perf_metrics: true and perf_metrics_max_requests in its file, and no " +
				"other reader, since each record is given out once")
		}
		v.report.Disturbed = v.report.Disturbed || all > 1
		probe.Reused = int64(float64(probe.PromptTokens) * (float64(over) / float64(all)))
		return nil
	// Such an engine counts only promised tokens. That is the next best: at least it has a connector, and it computes
	// no prompt itself.
	case v.old:
		if d.decode[promised] == 0 {
			return errors.New("the decode engine's /metrics page counts no KV from elsewhere " +
				"(vllm:prompt_tokens_by_source_total is in 0.16 and newer, " +
				"vllm:external_prefix_cache_hits_total did not rise): nothing can be proven")
		}
		over, all = d.decode[promised], probe.PromptTokens
	case v.sglang && d.decode[sglangTokens] > 0: // older engines do not count what they compute
		all = d.decode[sglangPrompts]
		over = max(0, all-d.decode[sglangComputed])
		v.alone = v.alone || over == 0
	case !v.report.metrics: // decode engines of this protocol compute no prompt
		v.report.byResponse = true
		if !v.alone && probe.Mode != string(pdflow.ModeAggregated) && probe.Mode != string(pdflow.ModeFallback) {
			probe.Reused = probe.PromptTokens
		}
		return nil
	}
	if all > probe.PromptTokens+1 { // if P makes the first token, it is in D's prompt and in the client's response
		// Nobody knows whose tokens these were. The synthetic probe gets its share of them.
		v.report.Disturbed = true
		// the product may not fit 64 bits
		probe.Reused = int64(float64(probe.PromptTokens) * (float64(min(over, all)) / float64(all)))
		return nil
	}
	probe.Reused = min(over, probe.PromptTokens)
	return nil
}

// delta is what the engines of both roles counted meanwhile.
type delta struct{ prefill, decode counts }

func (v *verification) counts(ctx context.Context) (delta, error) {
	var d delta
	for _, side := range []struct {
		engines []string
		role    string
		into    *counts
	}{{v.Prefill, "prefill", &d.prefill}, {v.Decode, "decode", &d.decode}} {
		sum := counts{}
		for _, engine := range side.engines {
			if v.records {
				if err := v.take(ctx, side.role, engine); err != nil {
					return d, err
				}
				continue
			}
			pg, err := v.page(ctx, engine)
			if err != nil {
				return d, fmt.Errorf("%s engine: %w", side.role, err)
			}
			for _, s := range counted {
				sum[s] += pg.sum(s)
			}
		}
		*side.into = sum
	}
	if v.records {
		maps.Copy(d.decode, v.taken.decode)
		maps.Copy(d.prefill, v.taken.prefill)
	}
	return d, nil
}

// take adds up an engine's records.
func (v *verification) take(ctx context.Context, role, engine string) error {
	c, _, err := records(ctx, v.client, engine) // a prefill engine may have no such page; the proof comes from decode
	if err != nil {
		return fmt.Errorf("%s engine: %w", role, err)
	}
	into := v.taken.decode
	if role == "prefill" {
		into = v.taken.prefill
	}
	for s, n := range c {
		into[s] += n
	}
	return nil
}

// settle reads the counters until they include the response, or until patience ends.
func (v *verification) settle(ctx context.Context, before delta, result *SyntheticProbe) (delta, error) {
	for end := time.Now().Add(v.Patience); ; {
		now, err := v.counts(ctx)
		if err != nil {
			if result.Status != http.StatusOK { // what failed the synthetic probe may have ended an engine
				return delta{prefill: counts{}, decode: counts{}}, nil
			}
			return delta{}, err
		}
		d := delta{now.prefill.less(before.prefill), now.decode.less(before.decode)}
		// Engines count bytes after tokens. Wait for bytes, too, if the engine counts any.
		done := d.decode[promptTokens] >= result.PromptTokens &&
			(d.decode[takenOver] == 0 || before.bytes()+now.bytes() == 0 || d.bytes() > 0)
		switch {
		case v.records:
			done = d.decode[recorded] > 0
		case v.sglang:
			done = d.decode[sglangTokens] == 0 || d.decode[sglangPrompts] >= result.PromptTokens &&
				(d.decode[sglangComputed] > 0 || d.bytes() > 0)
		}
		if !v.report.metrics && !v.sglang || result.Status != http.StatusOK || done || time.Now().After(end) {
			return d, nil
		}
		if !sleep(ctx, 50*time.Millisecond) {
			return delta{}, context.Cause(ctx)
		}
	}
}

func (d delta) bytes() int64 {
	return d.prefill[nixlBytes] + d.decode[nixlBytes] + d.prefill[sglangBytes] + d.decode[recordedBytes]
}

// compare sends the same prompts to one engine alone. A salt keeps these requests out of the engine's prefix cache.
// With a store it asks the prefill engine, since that engine has computed itself what it finds in the store.
func (v *verification) compare(ctx context.Context) error {
	engine := v.Alone
	switch {
	case v.SkipText:
		return nil
	case engine != "":
	case v.traits().Serving.PairOnly:
		return nil
	case v.traits().Handoff.ContentStore:
		engine = v.Prefill[0]
	default:
		engine = v.Decode[0]
		if v.traits().Serving.PrefillPairOnly && slices.Contains(v.Prefill, engine) {
			return nil
		}
	}
	to := Gateway(engine, v.client, nil)
	for i := range v.report.Probes {
		probe := &v.report.Probes[i]
		if probe.Status != http.StatusOK {
			continue
		}
		alone, err := ask(ctx, to, completion(v.Model, probe.prompt, v.MaxTokens, "pdkit-"+
			probe.prompt[:min(16, len(probe.prompt))]))
		if err != nil {
			return fmt.Errorf("an engine alone gave no response: %w", err)
		}
		if alone.Status != http.StatusOK {
			v.report.textNote = fmt.Sprintf("the engine that was asked alone answered %d", alone.Status)
			return nil
		}
		v.report.Compared++
		if alone.Text != probe.Text {
			v.report.Different++
		}
	}
	return nil
}
