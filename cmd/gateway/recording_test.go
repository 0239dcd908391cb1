// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"

	"github.com/pdkit/pdkit/pdflow/decide/record"
)

// planted are words of clients: what their prompts say, their keys, headers and names.
var planted = []string{"sesame", "prompt", "planted", "Bearer", "X-Tenant", "acme-inc"}

// sends has clients send requests of many lengths, in conversations, with the planted words.
func (p *program) sends(n int) {
	var clients sync.WaitGroup
	for c := range 4 {
		clients.Go(func() {
			for i := range n / 4 {
				text := fmt.Sprintf("sesame %d ", c) + strings.Repeat("the secret prompt ", 1+i%30)
				body := fmt.Sprintf(`{"model":"tiny","user":"planted-user","max_tokens":4,"stream":%t,"prompt":%q}`,
					i%2 == 0, text)
				status, _, answer := p.complete(body, "Authorization", "Bearer planted-key", "X-Tenant", "acme-inc",
					"X-Request-Id", fmt.Sprintf("planted-%d-%d", c, i))
				assert.Equal(p.t, 200, status, answer)
			}
		})
	}
	clients.Wait()
}

// recorded returns the files of a folder.
func recorded(t *testing.T, folder string) (names, texts []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			raw, err := os.ReadFile(path)
			require.NoError(t, err)
			names, texts = append(names, d.Name()), append(texts, string(raw))
		}
		return err
	}))
	return names, texts
}

func TestWhatTheGatewayHasDecidedIsVerified(t *testing.T) {
	for name, c := range map[string]struct{ spec, want string }{
		"threshold": {"{mode: threshold, minPromptTokens: 40, uncachedTokens: 60}",
			`"action":"decode_alone","reason":"short"`},
		"predicted": {"{mode: predicted, objectives: {ttft: 1s}}", `"action":"`},
		"dry run":   {"{mode: predicted, minPromptTokens: 20, dryRun: true}", `"instead":"dry_run"`},
	} {
		t.Run(name, func(t *testing.T) {
			p, d := startPair(t)
			folder := t.TempDir()
			g := start(t, gatewayYAML("")+simYAML("  decision: "+c.spec+"\n", p, d), "-record-decisions="+folder,
				"-pick=prefix")
			g.sends(120)
			g.shows(`pd_decisions_recorded_total{gen_ai_request_model="tiny",pd_result="lost"} 0`)
			g.sample(`pd_decisions_recorded_total\{gen_ai_request_model="tiny",pd_result="written"\}`)
			g.signal()
			g.ended(exitOK)
			names, texts := recorded(t, folder)
			require.Len(t, texts, 1)
			assert.Regexp(t, `^tiny\.\d{8}T\d{6}\.\d{6}Z\.jsonl$`, names[0])
			report, err := record.Verify(strings.NewReader(texts[0]))
			require.NoError(t, err)
			require.Nil(t, report.First, "%v", report.First)
			assert.Equal(t, 120, report.Read)
			assert.Equal(t, 120, report.Alike)
			assert.Empty(t, report.Problems)
			assert.Contains(t, texts[0], c.want)
			for _, word := range planted {
				assert.NotContains(t, texts[0], word)
			}
			info, err := os.Stat(filepath.Join(folder, names[0]))
			require.NoError(t, err)
			assert.Equal(t, fs.FileMode(0o600), info.Mode().Perm())
		})
	}
}

func TestAFolderThatCannotBeWrittenFailsNoRequest(t *testing.T) {
	p, d := startPair(t)
	folder := t.TempDir()
	g := start(t, gatewayYAML("")+simYAML("  decision: {mode: never}\n", p, d), "-record-decisions="+folder)
	require.NoError(t, os.Remove(folder))
	g.sends(8)
	g.logs(1, "decisions are not recorded")
	g.shows(`pd_decisions_recorded_total{gen_ai_request_model="tiny",pd_result="lost"} 8`)
	assert.NotContains(t, g.log.String(), folder)
}

func TestTheOldestRecordsAreRemoved(t *testing.T) {
	folder := t.TempDir()
	old := func(name string, size int64) {
		f, err := os.Create(filepath.Join(folder, name))
		require.NoError(t, err)
		require.NoError(t, f.Truncate(size))
		require.NoError(t, f.Close())
	}
	for i := range 5 {
		old(fmt.Sprintf("a%%2Fb.2026010%dT000000.000000Z.jsonl", i+1), record.FileBytes)
	}
	for _, other := range []string{"a%2Fb.jsonl", "a%2Fb.c.20260101T000000.000000Z.jsonl", "notes.txt"} {
		old(other, record.FileBytes)
	}
	f, err := (&recordedFiles{folder: folder, name: recordName("a/b") + "."}).open()
	require.NoError(t, err)
	_, err = f.Write([]byte("x"))
	require.NoError(t, err)
	require.NoError(t, f.Close())
	names, _ := recorded(t, folder)
	require.Len(t, names, 7)
	assert.NotContains(t, names, "a%2Fb.20260101T000000.000000Z.jsonl")
	assert.NotContains(t, names, "a%2Fb.20260102T000000.000000Z.jsonl")
	assert.Contains(t, names, "a%2Fb.20260103T000000.000000Z.jsonl")
}

// A disk that is full for long, and a gateway that starts again and again.
func TestFilesWithLittleInThemRemoveNoGoodOnes(t *testing.T) {
	folder := t.TempDir()
	good := "m.20260101T000000.000000Z.jsonl"
	require.NoError(t, os.WriteFile(filepath.Join(folder, good), nil, 0o600))
	require.NoError(t, os.Truncate(filepath.Join(folder, good), record.FileBytes))
	files := &recordedFiles{folder: folder, name: "m."}
	for range 100 { // nothing can be written
		f, err := files.open()
		require.NoError(t, err)
		_, err = os.Stat(f.(*recordedFile).path)
		require.NoError(t, err)
		require.NoError(t, f.(*recordedFile).file.Close())
		_, err = f.Write([]byte("header"))
		require.Error(t, err)
		_ = f.Close()
	}
	names, _ := recorded(t, folder)
	assert.Equal(t, []string{good}, names)
	for range 100 { // a little can
		f, err := files.open()
		require.NoError(t, err)
		_, err = f.Write([]byte("header"))
		require.NoError(t, err)
		require.NoError(t, f.Close())
	}
	names, _ = recorded(t, folder)
	assert.Len(t, names, 101)
	assert.Contains(t, names, good)
}

// The order of names is that in which files were made, and two gateways never have the same file.
func TestAClockThatWasSetBackChangesNoOrder(t *testing.T) {
	folder := t.TempDir()
	future := "m.20990101T000000.000000Z.jsonl"
	require.NoError(t, os.WriteFile(filepath.Join(folder, future), nil, 0o600))
	for i := range 3 {
		f, err := (&recordedFiles{folder: folder, name: "m."}).open()
		require.NoError(t, err)
		defer f.Close()
		names, _ := recorded(t, folder)
		require.Len(t, names, 2+i)
		assert.Equal(t, filepath.Base(f.(*recordedFile).path), names[len(names)-1])
	}
}

func TestNoTwoModelsHaveTheSameFile(t *testing.T) {
	long := strings.Repeat("very-long-model-name/", 30)
	seen := map[string]string{}
	for model, want := range map[string]string{
		"Qwen2.5-7B_x": "Qwen2.5-7B_x", "meta-llama/Llama-3.1": "meta-llama%2FLlama-3.1", "a%2Fb": "a%252Fb",
		"a/b": "a%2Fb", "hf:a b": "hf%3Aa%20b", `a<>|*?"\b`: "a%3C%3E%7C%2A%3F%22%5Cb", "-rf": "%2Drf", ".x": "%2Ex",
		"$(x);&~é": "%24%28x%29%3B%26%7E%C3%A9", "*": "%2A", long: "", long + "2": "", long[:90]: "",
	} {
		name := recordName(model)
		if want != "" {
			assert.Equal(t, want, name)
		}
		assert.Regexp(t, `^[\w%][\w%.-]*(~[0-9a-f]{16})?$`, name)
		assert.LessOrEqual(t, len(name), 143-len("."+recordTime+recordEnd))
		assert.Empty(t, seen[name], "the same as of %s", model)
		seen[name] = model
	}
	f, err := (&recordedFiles{folder: t.TempDir(), name: recordName(long) + "."}).open()
	require.NoError(t, err)
	require.NoError(t, f.Close())
}

// As logrotate does it, and those who clean up by hand.
func TestAFileThatIsMovedOrEmptiedIsFollowedByAnother(t *testing.T) {
	for name, do := range map[string]func(path string) error{
		"moved":   func(path string) error { return os.Rename(path, path+".1") },
		"removed": os.Remove,
		"emptied": func(path string) error { return os.Truncate(path, 0) },
		"replaced": func(path string) error {
			return errors.Join(os.Remove(path), os.WriteFile(path, make([]byte, 99), 0o600))
		},
	} {
		f, err := (&recordedFiles{folder: t.TempDir(), name: "m."}).open()
		require.NoError(t, err)
		_, err = f.Write([]byte("header"))
		require.NoError(t, err)
		file := f.(*recordedFile)
		assert.False(t, file.Gone(), name)
		require.NoError(t, do(file.path))
		assert.True(t, file.Gone(), name)
		require.NoError(t, f.Close())
	}
}

func TestRecordingOfNothingIsSaid(t *testing.T) {
	p, d := newEngine(t, "m"), newEngine(t, "m")
	without := gatewayYAML("") + pairYAML("m", p, d, "")
	const says = "-record-decisions: no model has decisions to record"
	folder := "-record-decisions=" + t.TempDir()
	_, stdout, _ := check(t, "-config", write(t, without), folder)
	assert.Contains(t, stdout, "without effect: ")
	assert.Contains(t, stdout, says)
	g := start(t, without, folder)
	g.logs(1, "no model has decisions to record")
	with := gatewayYAML("") + pairYAML("m", p, d, "  decision: {mode: never}\n")
	_, stdout, _ = check(t, "-config", write(t, with), folder)
	assert.NotContains(t, stdout, says)
}

// A reload counts on, for new policies of the same model, too, and needs no folder.
func TestTheCountOfRecordsIsThatOfTheProgram(t *testing.T) {
	p, d := startPair(t)
	folder := t.TempDir()
	yaml := func(decision string) string {
		return gatewayYAML("") + simYAML("  decision: "+decision+"\n", p, d)
	}
	g := start(t, yaml("{mode: never}"), "-record-decisions="+folder)
	g.sends(8)
	const metric = `pd_decisions_recorded_total{gen_ai_request_model="tiny",pd_result="%s"} %d` + "\n"
	g.shows(fmt.Sprintf(metric, "written", 8))
	g.configure(yaml("{mode: threshold, minPromptTokens: 40}"))
	g.logs(1, reloadedLine)
	g.shows(fmt.Sprintf(metric, "written", 8))
	g.sends(4)
	g.shows(fmt.Sprintf(metric, "written", 12))
	require.NoError(t, os.RemoveAll(folder))
	g.configure(yaml("{mode: never, dryRun: true}"))
	g.logs(2, reloadedLine)
	g.sends(4)
	g.shows(fmt.Sprintf(metric, "lost", 4))
	g.shows(fmt.Sprintf(metric, "written", 12))
	g.configure(yaml("{mode: never}"))
	g.logs(3, reloadedLine)
	g.sends(4)
	g.shows(`pd_decisions_total{gen_ai_request_model="tiny",pd_action="decode_alone",pd_dry_run="false",` +
		`pd_reason="policy"} 12` + "\n")
}

// What a form of a model had from the one before stays that one's, if the form cannot be built.
func TestAFormThatCannotBeBuiltEndsNothingOfTheOneBefore(t *testing.T) {
	p, d := newEngine(t, "m"), newEngine(t, "m")
	read := func(spec string) *configuration {
		cfg, err := parse("x.yaml", []byte(gatewayYAML("")+pairYAML("m", p, d, spec)))
		require.NoError(t, err)
		cfg.recording = recording{folder: t.TempDir(), share: 1}
		return cfg
	}
	before := read("  decision: {mode: never}\n  admission: {mode: fixed, inFlightPerDecode: 1}\n")
	g, err := build(before, &telemetry{}, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	m, err := g.buildModel(before.models[0], nil)
	require.NoError(t, err)
	m.pool.decision, m.pool.admission = m.decision, m.admission
	for instrument, spec := range map[string]string{
		"pd.decisions":          "  decision: {mode: predicted}\n  admission: {mode: fixed, inFlightPerDecode: 1}\n",
		"pd.decisions.recorded": "  decision: {mode: predicted}\n  admission: {mode: fixed, inFlightPerDecode: 1}\n",
		"pd.admission.queued":   "  decision: {mode: never}\n  admission: {mode: fixed, inFlightPerDecode: 2}\n",
	} {
		g.tel.meters = sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewManualReader()),
			sdkmetric.WithView(sdkmetric.NewView(sdkmetric.Instrument{Name: instrument},
				sdkmetric.Stream{Aggregation: sdkmetric.AggregationLastValue{}})))
		_, err = g.buildModel(read(spec).models[0], []*pool{m.pool})
		require.Error(t, err, instrument)
		assert.Equal(t, int64(1), m.decision.users.Load(), instrument)
		assert.Equal(t, int64(1), m.admission.users.Load(), instrument)
	}
	m.release()
	assert.Zero(t, m.decision.users.Load())
}
