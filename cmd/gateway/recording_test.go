// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

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
	f, err := (&recordedFiles{folder: folder, name: "a%2Fb."}).open()
	require.NoError(t, err)
	require.NoError(t, f.Close())
	names, _ := recorded(t, folder)
	require.Len(t, names, 7)
	assert.NotContains(t, names, "a%2Fb.20260101T000000.000000Z.jsonl")
	assert.NotContains(t, names, "a%2Fb.20260102T000000.000000Z.jsonl")
	assert.Contains(t, names, "a%2Fb.20260103T000000.000000Z.jsonl")
}
