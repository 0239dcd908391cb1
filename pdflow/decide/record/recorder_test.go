// SPDX-License-Identifier: Apache-2.0

package record_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide"
	"github.com/pdkit/pdkit/pdflow/decide/record"
	"github.com/pdkit/pdkit/pdflow/pick"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// files are files in memory.
type files struct {
	mu   sync.Mutex
	all  []*bytes.Buffer
	fail error // of the next Open
	full int   // bytes of a file, after which Write fails; 0: never
}

func (f *files) set(fail error, full int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail, f.full = fail, full
}

type memory struct {
	f *files
	b *bytes.Buffer
}

func (f *files) open() (io.WriteCloser, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fail != nil {
		return nil, f.fail
	}
	f.all = append(f.all, &bytes.Buffer{})
	return memory{f, f.all[len(f.all)-1]}, nil
}

func (m memory) Write(b []byte) (int, error) {
	m.f.mu.Lock()
	defer m.f.mu.Unlock()
	if room := m.f.full - m.b.Len(); m.f.full > 0 && len(b) > room {
		m.b.Write(b[:room])
		return room, errors.New("no space left on device")
	}
	return m.b.Write(b)
}

func (m memory) Close() error { return nil }

func (f *files) text(i int) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.all[i].String()
}

func newSet(t testing.TB, prefill, decode int) *discovery.Set {
	t.Helper()
	source := discoverytest.NewManual()
	set := discovery.NewSet(source)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = set.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	var eps []discovery.Endpoint
	for i := range prefill + decode {
		role := discovery.RolePrefill
		if i >= prefill {
			role = discovery.RoleDecode
		}
		e, err := discovery.New(fmt.Sprintf("http://e%d:1", i), role)
		require.NoError(t, err)
		eps = append(eps, e)
	}
	changed := set.Changed()
	source.Publish(eps...)
	<-changed
	return set
}

func request(t testing.TB, prompt string) *connector.ClientRequest {
	t.Helper()
	r, err := connector.ParseRequest(connector.APICompletions,
		fmt.Appendf(nil, `{"model":"m","prompt":%q,"stream":true}`, prompt))
	require.NoError(t, err)
	return r
}

// fleet is a picker whose requests take a time that follows from their lengths, and which records them.
type fleet struct {
	t       testing.TB
	picker  pdflow.Picker
	chance  *rand.Rand
	now     time.Time
	running []func()
}

func newFleet(t testing.TB, spec record.Spec, o decide.Options, recorder decide.Recorder) *fleet {
	t.Helper()
	f := &fleet{t: t, chance: rand.New(rand.NewPCG(1, 1)), now: time.Unix(1e9, 0)}
	policy, err := spec.Policy()
	require.NoError(t, err)
	o.Now, o.Recorder, o.Rand = func() time.Time { return f.now }, recorder, f.chance.Uint64
	picker, err := decide.New(pick.New(newSet(t, 4, 4), pick.PrefixAffinity(), pick.WithCandidates(), pick.WithSeed(1)),
		policy, &o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, picker.Close()) })
	f.picker = picker.Bind(nil, connector.Serving{})
	return f
}

// serve serves so many requests, some of them with a second attempt.
func (f *fleet) serve(n int) {
	for i := range n {
		f.now = f.now.Add(time.Duration(f.chance.IntN(40)) * time.Millisecond)
		r := request(f.t, strings.Repeat(fmt.Sprintf("conversation %d ", i%17), 4<<f.chance.IntN(9)))
		attempts := 1 + f.chance.IntN(20)/19
		for attempt := 1; attempt <= attempts; attempt++ {
			f.attempt(r, attempt, attempt < attempts)
		}
		for len(f.running) > 24 {
			f.end()
		}
	}
	for len(f.running) > 0 {
		f.end()
	}
}

func (f *fleet) end() {
	i := f.chance.IntN(len(f.running))
	end := f.running[i]
	f.running = append(f.running[:i], f.running[i+1:]...)
	end()
}

func (f *fleet) attempt(r *connector.ClientRequest, attempt int, fails bool) {
	x, err := f.picker.Pick(context.Background(), &pdflow.PickInput{Request: r, Attempt: attempt})
	if err != nil {
		require.ErrorIs(f.t, err, pdflow.CodeOverloaded)
		return
	}
	out := &pdflow.Outcome{Session: &connector.Session{Request: r}, Mode: pdflow.ModeDisaggregated}
	began := f.now
	if x.Prefill.URL != nil {
		f.now = f.now.Add(time.Duration(len(r.Body())) * 10 * time.Microsecond)
		out.Prefill = pdflow.LegOutcome{Start: began, End: f.now}
		x.PrefillDone(&out.Prefill)
	}
	out.Decode = pdflow.LegOutcome{Start: f.now, FirstByte: f.now.Add(50 * time.Millisecond)}
	if fails {
		out.Err = &pdflow.Error{Code: pdflow.CodeDecodeFailed}
		x.Done(out)
		return
	}
	f.running = append(f.running, func() {
		out.Usage = pdflow.Usage{Output: 100, Cached: 64}
		out.Decode.End = f.now.Add(time.Second)
		x.Done(out)
	})
}

func h100(*discovery.Endpoint) decide.Facts {
	return decide.Facts{KVTokens: 411_200,
		Speed: decide.Speed{Base: 6.83e-3, PerRequest: 4.42e-6, PerContext: 76.2e-9, PerPrompt: 31.4e-6}}
}

func refusable(*pdflow.PickInput) decide.Class { return decide.Class{Refusable: true} }

// Whatever decides, and whether it is followed, counted only, doubted, refused or tried again: the code that has
// decided decides alike on what was recorded.
func TestEachDecisionIsVerified(t *testing.T) {
	for name, c := range map[string]struct {
		spec    record.Spec
		options decide.Options
		want    string // in the file
	}{
		"always": {record.Spec{Mode: "always"}, decide.Options{}, `"action":"split","reason":"policy"`},
		"never":  {record.Spec{Mode: "never"}, decide.Options{}, `"action":"decode_alone","reason":"policy"`},
		"threshold": {record.Spec{Mode: "threshold", MinPromptTokens: 100, UncachedTokens: 200}, decide.Options{},
			`"cached"`},
		"predicted, learnt": {record.Spec{Mode: "predicted", TTFT: 300 * time.Millisecond},
			decide.Options{ErrorBound: -1}, `"action":"decode_alone"`},
		"predicted, told": {record.Spec{Mode: "predicted", MinPromptTokens: 50}, decide.Options{Engine: h100,
			TokenBytes: 131_072, Link: 2.5e9, ErrorBound: -1}, `"bytesPerSecond":2.5`},
		"doubtful": {record.Spec{Mode: "predicted"}, decide.Options{ErrorBound: 1e-3}, `"instead":"doubtful"`},
		"dry run": {record.Spec{Mode: "predicted"}, decide.Options{DryRun: true, ErrorBound: -1},
			`"instead":"dry_run"`},
		"refused": {record.Spec{Mode: "predicted", TTFT: 50 * time.Millisecond}, decide.Options{Class: refusable,
			ErrorBound: -1}, `"action":"refuse","reason":"objectives","error":"overloaded"`},
		"again": {record.Spec{Mode: "never"}, decide.Options{}, `"attempt":2`},
	} {
		t.Run(name, func(t *testing.T) {
			var f files
			r := record.New(record.Options{Header: record.Header{Policy: c.spec, Share: 1, DryRun: c.options.DryRun},
				Open: f.open})
			newFleet(t, c.spec, c.options, r).serve(400)
			r.Close()
			written, lost := r.Counts()
			assert.Zero(t, lost)
			assert.GreaterOrEqual(t, written, int64(400))
			require.Len(t, f.all, 1)
			assert.Contains(t, f.text(0), c.want)
			for line := range strings.Lines(f.text(0)) {
				require.LessOrEqual(t, len(line), 400)
			}
			report, err := record.Verify(strings.NewReader(f.text(0)))
			require.NoError(t, err)
			require.Nil(t, report.First, "%v", report.First)
			assert.Equal(t, int(written), report.Read)
			assert.Equal(t, report.Read, report.Alike)
			assert.Empty(t, report.Problems)
			t.Logf("%d decisions in %d bytes, %d a decision", written, len(f.text(0)), int64(len(f.text(0)))/written)
		})
	}
}

// Another threshold, as another version of the code would have it.
func TestTheFirstDifferenceIsShown(t *testing.T) {
	var f files
	spec := record.Spec{Mode: "predicted", TTFT: 2 * time.Second}
	r := record.New(record.Options{Header: record.Header{Policy: spec, Share: 1}, Open: f.open})
	newFleet(t, spec, decide.Options{Engine: h100, TokenBytes: 131_072, Link: 2.5e9}, r).serve(300)
	r.Close()
	other := strings.Replace(f.text(0), `"ttft":2000000000`, `"ttft":20000000`, 1)
	report, err := record.Verify(strings.NewReader(other))
	require.NoError(t, err)
	require.NotNil(t, report.First)
	assert.Less(t, report.Alike, report.Read)
	assert.Regexp(t, `(?s)^line \d+, decided at 2001-09-09T01:4\S+Z on a prompt of \d+ tokens:\n  recorded: `+
		`(split between e\d+:1 and e\d+:1|decode_alone at e\d+:1), \w+, predicted TTFT \S+ and ITL \S+\n  now:  `,
		report.First.String())
	t.Log(report.First)
}

func TestAFileThatIsDamagedIsReadAsFarAsItGoes(t *testing.T) {
	var f files
	spec := record.Spec{Mode: "threshold", MinPromptTokens: 100}
	r := record.New(record.Options{Header: record.Header{Policy: spec, Share: 1}, Open: f.open})
	newFleet(t, spec, decide.Options{Engine: h100, TokenBytes: 131_072, Link: 2.5e9}, r).serve(200)
	r.Close()
	whole := f.text(0)
	lines := strings.SplitAfter(strings.TrimSuffix(whole, "\n"), "\n")
	engine, decision := 0, 0
	for i, l := range lines {
		if strings.HasPrefix(l, `{"engine"`) {
			engine = i
		}
		if strings.HasPrefix(l, `{"at"`) && decision == 0 {
			decision = i
		}
	}
	with := func(i int, l string) string {
		other := append([]string(nil), lines...)
		other[i] = l
		return strings.Join(other, "")
	}
	changed := func(old, now string) string { return with(decision, strings.Replace(lines[decision], old, now, 1)) }
	all, err := record.Verify(strings.NewReader(whole))
	require.NoError(t, err)
	last := lines[len(lines)-1]
	for name, c := range map[string]struct {
		text string
		want map[record.Problem]int
	}{
		"killed":         {whole[:len(whole)-len(last)/2], map[record.Problem]int{record.Cut: 1}},
		"garbage":        {with(decision, "\x00\xff{\n"), map[record.Problem]int{record.Damaged: 1}},
		"a bit":          {changed(`"data":"`, `"data":"  `), map[record.Problem]int{record.Damaged: 1}},
		"a long line":    {with(decision, strings.Repeat("x", 1<<20)+"\n"), map[record.Problem]int{record.Damaged: 1}},
		"another kind":   {with(decision, `{"weather":"fine"}`+"\n"), map[record.Problem]int{record.Newer: 1}},
		"another action": {changed(`"action":"`, `"action":"x`), map[record.Problem]int{record.Newer: 1}},
		"an empty line":  {with(decision, "\n"), map[record.Problem]int{}},
	} {
		report, err := record.Verify(strings.NewReader(c.text))
		require.NoError(t, err, name)
		assert.Equal(t, c.want, report.Problems, name)
		assert.Nil(t, report.First, name)
		assert.Equal(t, all.Read-1, report.Alike, name)
	}
	report, err := record.Verify(strings.NewReader(with(engine, "{}\n")))
	require.NoError(t, err)
	t.Log(report.Problems, engine)
	assert.Positive(t, report.Problems[record.Lost], "decisions on an engine whose line is gone")
	assert.Nil(t, report.First)
	assert.Equal(t, all.Read, report.Alike+report.Problems[record.Lost])

	for _, text := range []string{"{}", "garbage\n", `{"at":1}` + "\n", "\n",
		strings.Replace(whole, `"pdkitDecisions":1`, `"pdkitDecisions":2`, 1)} {
		_, err := record.Verify(strings.NewReader(text))
		require.Error(t, err)
		require.NotErrorIs(t, err, record.ErrEmpty)
	}
	// A gateway that was killed, a disk that was full, and a machine that lost its power.
	for _, text := range []string{"", `{"pdk`, lines[0][:len(lines[0])-3], strings.Repeat("\x00", 1<<18)} {
		_, err := record.Verify(strings.NewReader(text))
		require.ErrorIs(t, err, record.ErrEmpty)
	}
}

// Whatever was left of a file that was cut off, what stands behind it belongs to the next one's header, or to none.
func TestFilesThatWereJoinedAreReadAsEachByItself(t *testing.T) {
	recorded := func(spec record.Spec) string {
		var f files
		r := record.New(record.Options{Header: record.Header{Policy: spec, Share: 1}, Open: f.open})
		newFleet(t, spec, decide.Options{Engine: h100}, r).serve(100)
		r.Close()
		return f.text(0)
	}
	a := recorded(record.Spec{Mode: "threshold", MinPromptTokens: 100})
	b := recorded(record.Spec{Mode: "never"})
	header, rest, _ := strings.Cut(b, "\n")
	inA, inB, lines := strings.Count(a, `{"at":`), strings.Count(b, `{"at":`), strings.Count(rest, "\n")
	type problems = map[record.Problem]int
	for name, c := range map[string]struct {
		text  string
		alike int
		want  problems
	}{
		"whole":         {a + b + a, 2*inA + inB, problems{}},
		"cut off":       {a[:len(a)-9] + b, inA - 1 + inB, problems{record.Cut: 1}},
		"only a header": {a[:9] + b, inB, problems{}},
		"no power":      {a + strings.Repeat("\x00", 2<<16-50) + b, inA + inB, problems{record.Cut: 1}},
		"a newer one":   {a + strings.Replace(b, `s":1,`, `s":2,`, 1) + a, 2 * inA, problems{record.Newer: lines}},
		"a header is bad": {a + header[9:] + "\n" + rest + b, inA + inB,
			problems{record.Damaged: 1, record.Headless: lines}},
	} {
		report, err := record.Verify(strings.NewReader(c.text))
		require.NoError(t, err, name)
		assert.Nil(t, report.First, "%s: %v", name, report.First)
		assert.Equal(t, c.want, report.Problems, name)
		assert.Equal(t, c.alike, report.Alike, name)
	}
}

// Conversations are recorded whole, or not at all, and a part of them that is near the share.
func TestConversationsAreSampledWhole(t *testing.T) {
	r := record.New(record.Options{Header: record.Header{Share: 0.25}, Open: (&files{}).open})
	defer r.Close()
	taken := 0
	for c := range 600 {
		chat := `{"model":"m","messages":[{"role":"system","content":"` + strings.Repeat("You help. ", 100) +
			fmt.Sprintf(`"},{"role":"user","content":"question %d"}`, c)
		var turns []bool
		for range 3 {
			q, err := connector.ParseRequest(connector.APIChat, []byte(chat+"]}"))
			require.NoError(t, err)
			turns = append(turns, r.Sample(&pdflow.PickInput{Request: q}) != nil)
			chat += `,{"role":"assistant","content":"` + strings.Repeat("answer ", 60) + `"},` +
				`{"role":"user","content":"and?"}`
		}
		if turns[0] {
			taken++
		}
		require.Equal(t, []bool{turns[0], turns[0], turns[0]}, turns, "conversation %d", c)
	}
	assert.InDelta(t, 150, taken, 50)

	taken = 0 // of a client that writes members in the order of their names
	for c := range 600 {
		q, err := connector.ParseRequest(connector.APIChat,
			fmt.Appendf(nil, `{"messages":[{"content":"question %d","role":"user"}],"model":"m"}`, c))
		require.NoError(t, err)
		if r.Sample(&pdflow.PickInput{Request: q}) != nil {
			taken++
		}
	}
	assert.InDelta(t, 150, taken, 50)
}

// Beginnings that two prompts have in common have the same hashes, and no others.
func TestPrefixesTellWhatPromptsHaveInCommon(t *testing.T) {
	var f files
	spec := record.Spec{Mode: "always"}
	r := record.New(record.Options{Header: record.Header{Policy: spec, Share: 1}, Open: f.open})
	fl := newFleet(t, spec, decide.Options{}, r)
	common := strings.Repeat("abcd", 300) // 1,200 bytes
	for _, prompt := range []string{common + strings.Repeat("x", 8000), common + strings.Repeat("y", 8000)} {
		fl.attempt(request(t, prompt), 1, true)
	}
	r.Close()
	_, entries, err := record.Read(strings.NewReader(f.text(0)))
	require.NoError(t, err)
	var all [][]record.Prefix
	for e, err := range entries {
		require.NoError(t, err)
		all = append(all, e.Prefixes)
	}
	require.Len(t, all, 2)
	require.Len(t, all[0], 6) // 256 bytes to 8 KiB
	for i := range all[0] {
		assert.Equal(t, i < 3, all[0][i].Hash == all[1][i].Hash, "prefix of %d bytes", 256<<i)
		assert.InDelta(t, 64<<i, all[0][i].Tokens, float64(int(1)<<i))
	}
}

// A file that cannot be written fails no request. It is told, and tried again.
func TestAFileThatCannotBeWrittenIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := files{fail: errors.New("permission denied")}
		var told []error
		r := record.New(record.Options{Header: record.Header{Share: 1}, Open: f.open,
			Failed: func(err error) { told = append(told, err) }})
		end := func() {
			x := r.Sample(&pdflow.PickInput{})
			x.Time = time.Now()
			r.End(x)
			time.Sleep(time.Second)
		}
		for range 8 {
			end()
		}
		synctest.Wait()
		assert.Len(t, told, 1, "once, and not for each decision")
		_, lost := r.Counts()
		assert.Equal(t, int64(8), lost)

		f.set(nil, 1000)
		time.Sleep(time.Minute)
		for range 20 {
			x := r.Sample(&pdflow.PickInput{})
			x.Time = time.Now()
			r.End(x)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		assert.Len(t, told, 2, "the disk is full")
		f.set(nil, 0)
		time.Sleep(time.Minute)
		end()
		r.Close()
		assert.Len(t, told, 2)
		written, lost := r.Counts()
		assert.Equal(t, int64(29), written+lost)
		require.Len(t, f.all, 2)
		report, err := record.Verify(strings.NewReader(f.text(1)))
		require.NoError(t, err)
		assert.Equal(t, 1, report.Read)
	})
}

func TestAFullFileIsFollowedByAnotherOne(t *testing.T) {
	var f files
	spec := record.Spec{Mode: "threshold", MinPromptTokens: 100}
	r := record.New(record.Options{Header: record.Header{Policy: spec, Share: 1}, Open: f.open, MaxBytes: 20_000})
	newFleet(t, spec, decide.Options{}, r).serve(400)
	r.Close()
	require.Greater(t, len(f.all), 2)
	read := 0
	for i := range f.all {
		assert.Less(t, f.all[i].Len(), 20_000+64<<10)
		report, err := record.Verify(strings.NewReader(f.text(i)))
		require.NoError(t, err)
		assert.Equal(t, report.Read, report.Alike)
		assert.Empty(t, report.Problems)
		read += report.Read
	}
	written, _ := r.Counts()
	assert.Equal(t, int(written), read)
}
