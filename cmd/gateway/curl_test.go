// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/enginesim/clientstest"
)

// Exit codes of curl.
const (
	curlFine    = 0
	curlPartial = 18 // the response is cut
	curlRefused = 22 // 400 or more
	curlTimeout = 28
)

// curl posts a body, and returns what it printed and its exit code.
func curl(t *testing.T, url, body string, flags ...string) (out string, code int) {
	t.Helper()
	flags = append(flags, "--silent", "--no-buffer", "--fail-with-body", "--noproxy", "*", "--json", body, url)
	cmd := exec.CommandContext(t.Context(), "curl", flags...)
	said, err := cmd.Output()
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return string(said), cmd.ProcessState.ExitCode()
}

func TestCurl(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("curl"); err != nil {
		clientstest.Missing(t, "curl")
	}
	s := newSite(t)
	prompt := strings.Repeat("a cat on a mat ", 20)
	for path, prompted := range map[string]string{
		"/v1/completions":      `"prompt":"` + prompt + `"`,
		"/v1/chat/completions": `"messages":[{"role":"user","content":"` + prompt + `"}]`,
		"/v1/messages":         `"messages":[{"role":"user","content":"` + prompt + `"}]`,
	} {
		t.Run(path, func(t *testing.T) {
			ask := `"model":"tiny",` + prompted + `,"max_tokens":`
			out, code := curl(t, s.client+path, "{"+ask+"12}")
			require.Equal(t, curlFine, code, out)
			want := s.said(t)
			assert.Equal(t, want, answerOf(t, out))
			out, code = curl(t, s.client+path, "{"+ask+`12,"stream":true}`)
			require.Equal(t, curlFine, code, out)
			assert.Equal(t, want.Texts[0], texts(t, out))
			assert.True(t, strings.HasSuffix(out, "data: [DONE]\n\n"), out)
			s.settled(t)

			out, code = curl(t, s.client+path, strings.Replace("{"+ask+"12}", "tiny", "nobody", 1))
			assert.Equal(t, curlRefused, code)
			assert.True(t, json.Valid([]byte(out)), out)
			s.d.Inject(enginesim.Fault{Kind: enginesim.FaultResetStream, AfterChunks: 8})
			out, code = curl(t, s.client+path, "{"+ask+`12,"stream":true}`)
			assert.Equal(t, curlPartial, code, out)
			assert.NotEmpty(t, texts(t, out))

			before := s.d.Stats().Aborted
			_, code = curl(t, s.client+path, "{"+ask+`7000,"stream":true}`, "--max-time", "2")
			assert.Equal(t, curlTimeout, code)
			eventually(t, func() bool { return s.d.Stats().Aborted == before+1 }, "the decode leg goes on")
		})
	}
}
