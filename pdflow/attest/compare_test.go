// SPDX-License-Identifier: Apache-2.0

package attest

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestResponsesAreComparedWithATolerance(t *testing.T) {
	const ref = `{"choices":[{"text":"abc","logprobs":{"tokens":["a","b","c"],"token_logprobs":[-1.0,-0.5,-0.7],` +
		`"top_logprobs":[{"a":-1.0,"z":-1.1},{"b":-0.5,"x":-0.6,"y":-3.0},{"c":-0.7}]}}]}`
	for rule, c := range map[string]struct {
		got  string
		same bool
	}{
		"the same": {ref, true},
		"kernels differ a little": {`{"choices":[{"text":"abc","logprobs":{"tokens":["a","b","c"],` +
			`"token_logprobs":[-1.1,-0.4,-0.7]}}]}`, true},
		"the text is right, but the first token's logprob is not": {`{"choices":[{"text":"abc","logprobs":` +
			`{"tokens":["a","b","c"],"token_logprobs":[-2.0,-0.5,-0.7]}}]}`, false},
		"another token by a tie, and what follows differs": {`{"choices":[{"text":"axq","logprobs":{"tokens":` +
			`["a","x","q"],"token_logprobs":[-1.0,-0.55,-0.1]}}]}`, true},
		"the first token by a tie": {`{"choices":[{"text":"z","logprobs":{"tokens":["z"],` +
			`"token_logprobs":[-1.05]}}]}`, true},
		"another token by no tie": {`{"choices":[{"text":"ayc","logprobs":{"tokens":["a","y","c"],` +
			`"token_logprobs":[-1.0,-0.5,-0.7]}}]}`, false},
		"a token that is not among the reference's": {`{"choices":[{"text":"aqc","logprobs":{"tokens":["a","q","c"],` +
			`"token_logprobs":[-1.0,-0.5,-0.7]}}]}`, false},
		"no tokens, the same text": {`{"choices":[{"text":"abc"}]}`, true},
		"no tokens, another text":  {`{"choices":[{"text":"abd"}]}`, false},
		"no token's logprob":       {`{"choices":[{"text":"abc","logprobs":{"tokens":["a","b","c"]}}]}`, true},
		"it ended sooner, after right tokens": {`{"choices":[{"text":"a","logprobs":{"tokens":["a"],` +
			`"token_logprobs":[-1]}}]}`, true},
		"null logprobs": {`{"choices":[{"text":"abc","logprobs":{"tokens":["a","b","c"],` +
			`"token_logprobs":[null,null,null],"top_logprobs":[null,null,null]}}]}`, true},
	} {
		want, err := parse([]byte(ref))
		require.NoError(t, err)
		got, err := parse([]byte(c.got))
		require.NoError(t, err)
		require.Equal(t, c.same, got.same(want, 0.3), rule)
	}
}

func TestWhatIsNoCompletionIsAnError(t *testing.T) {
	for _, body := range []string{``, `[]`, `{}`, `{"choices":[]}`, `{"choices":[{}]}`, `{"choices":[{"text":1}]}`,
		`{"choices":[{"text":"a"},{"text":"b"}]}`} {
		_, err := parse([]byte(body))
		require.ErrorIs(t, err, errNotJSON, body)
	}
}

func TestPromptsAreUnique(t *testing.T) {
	seen := map[string]bool{}
	for range 100 {
		text := prompt(64)
		require.Len(t, text, 64)
		require.False(t, seen[text[:16]], "not even the first block of two prompts is the same")
		seen[text[:16]] = true
	}
}
