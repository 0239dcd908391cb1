// SPDX-License-Identifier: Apache-2.0

package file_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/file"
)

func TestYAMLAndJSONSayTheSame(t *testing.T) {
	for name, text := range map[string]string{
		"YAML": `
# two engines
endpoints:
  - url: http://10.0.0.1:8000/base/
    role: prefill
    group: a
    zone: z1
    attributes: {bootstrapPort: "8998"}
  - {url: "https://[::1]:8000", role: both}
`,
		"JSON": `{"endpoints": [
  {"url": "http://10.0.0.1:8000/base/", "role": "prefill", "group": "a", "zone": "z1",
   "attributes": {"bootstrapPort": "8998"}},
  {"url": "https://[::1]:8000", "role": "both"}]}`,
		"JSON with the escapes that YAML has not": `{"endpoints": [
	{"url": "http:\/\/10.0.0.1:8000\/base", "role": "prefill", "group": "\u0061", "zone": "z1",
	 "attributes": {"bootstrapPort": "8998", "emoji": "\ud83d\ude00\\ud83d\u00e9\n"}},
	{"url": "https:\/\/[::1]:8000", "role": "both"}]}`,
		"anchors and merges": `
endpoints:
  - &p {url: "http://10.0.0.1:8000/base/", role: prefill, group: a, zone: z1, attributes: &a {bootstrapPort: "8998"}}
  - {<<: [{url: "https://[::1]:8000", role: prefill}], role: both}
`,
		"CRLF": "endpoints:\r\n  - {url: 'http://10.0.0.1:8000/base', role: prefill, group: a, zone: z1, attributes: " +
			"{bootstrapPort: '8998'}}\r\n  - {url: 'https://[::1]:8000', role: both}\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			list, err := file.Parse([]byte(text))
			require.NoError(t, err)
			require.Len(t, list, 2)
			p, b := list[0], list[1]
			assert.Equal(t, "10.0.0.1:8000/base", p.ID)
			assert.Equal(t, "http://10.0.0.1:8000/base", p.URL.String())
			assert.Equal(t, []any{discovery.RolePrefill, "a", "z1", "8998"},
				[]any{p.Role, p.Group, p.Zone, p.Attribute("bootstrapPort")})
			assert.Equal(t, []any{discovery.RoleBoth, "[::1]:8000", ""}, []any{b.Role, b.ID, b.Group})
			if text, there := p.Attributes["emoji"]; there {
				assert.Equal(t, "\U0001f600\\ud83dé\n", text)
			}
		})
	}
}

func TestAFileCanBeReadOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "endpoints.json")
	_, err := file.Load(path)
	require.EqualError(t, err, "cannot be read: no such file or directory")
	write(t, path, `{"endpoints": [{"url": "http://a:1", "role": "both"}]}`)
	list, err := file.Load(path)
	require.NoError(t, err)
	assert.Len(t, list, 1)
	write(t, path, "endpoint: []")
	_, err = file.Load(path)
	require.ErrorContains(t, err, "line 1: endpoint: unknown field")
}

func TestAnEmptyListIsWrittenAsOne(t *testing.T) {
	list, err := file.Parse([]byte("endpoints: []"))
	require.NoError(t, err)
	assert.Empty(t, list)
}

// Each fault names its line, its field and what would be right, and shows no value.
func TestFaults(t *testing.T) {
	const good = `{url: "http://hunter2:1", role: decode}`
	for text, want := range map[string]string{
		"":                                  "line 1: file: is empty; write endpoints: [] for none",
		"# nothing\n":                       "line 1: file: is empty; write endpoints: [] for none",
		"endpoints:\n":                      "line 1: endpoints: is missing; write endpoints: [] for none",
		"- " + good:                         "line 1: document: is not a mapping; write its members as NAME: VALUE",
		"hunter2":                           "line 1: document: is not a mapping; write its members as NAME: VALUE",
		"endpoint: []":                      "line 1: endpoint: unknown field; did you mean endpoints?",
		"endpoints: []\n---\nendpoints: []": "line 3: document: is a second document; write one list",
		"endpoints:\n- " + good + "\n- {url: http://hunter2:1/, role: both}": "line 3: endpoints[1].url: is " +
			"listed twice, first as [0]; list each engine once; one that serves both legs has role: both",
		"endpoints:\n- {url: http://a, role: both}\n- {url: http://A:80, role: both}": "line 3: endpoints[1].url: is " +
			"listed twice, first as [0]; list each engine once; one that serves both legs has role: both",
		"endpoints:\n- {url: http://a:1}": "line 2: endpoints[0].role: " +
			"is missing; write prefill, decode, both or encode",
		"endpoints:\n- {url: http://a:1, role: hunter2}": "line 2: endpoints[0].role: " +
			"is not a role; known are prefill, decode, both, encode",
		"endpoints:\n- {url: http://a:1, role: 5}": "line 2: endpoints[0].role: " +
			"is a number, not a string; put it in quotes",
		"endpoints:\n- {role: both}": "line 2: endpoints[0].url: is " +
			"missing; write http://HOST:PORT",
		"endpoints:\n- {role: both, url: hunter2}": "line 2: endpoints[0].url: is " +
			"not an engine's address (the scheme is not http or https); write http://HOST:PORT",
		"endpoints:\n- {role: both,\n   url: 'http://u:hunter2@a:1'}": "line 3: endpoints[0].url: is " +
			"not an engine's address (user info is not allowed in an engine's URL); write http://HOST:PORT",
		"endpoints:\n- {url: http://a:1, role: both, attributes: {port: 8998}}": "line 2: " +
			"endpoints[0].attributes.port: is a number, not a string; put it in quotes",
		"endpoints:\n- {url: http://a:1, role: both, attributes: [hunter2]}": "line 2: endpoints[0].attributes: " +
			"is a list, not an object; write its members by name",
		"endpoints:\n- {url: http://a:1, role: both, attributes: {\"a b\": {}}}": "line 2: " +
			"endpoints[0].attributes[\"a b\"]: is an object, not a string; write a string",
		"endpoints:\n- {url: http://a:1, role: both, model: hunter2}": "line 2: endpoints[0].model: " +
			"unknown field; known are attributes, group, role, url, zone",
		"endpoints:\n- {url: http://a, role: both}\n- {url: https://a, role: both}": "line 3: endpoints[1].url: has " +
			"the name of engine [0], since neither has a port; write the ports",
		"endpoints:\n- {url: http://a:1, role: both, zone: a, zone: hunter2}": "line 2: endpoints[0].zone: is " +
			"given twice, first on line 2; keep one of the two",
		"endpoints:\n- {url: http://a:1, role: both, ? [a] : b}": "line 2: endpoints[0]: has a " +
			"key that is not a name; write NAME: VALUE",
		"endpoints:\n- null": "line 2: endpoints[0]: is null; remove it",
		"endpoints:\n- {url: hunter2": "line 2: yaml: did not find expected ',' or '}'; " +
			"correct the syntax at or just before this line",
		"endpoints: [*hunter2]": "line 1: yaml: an alias names an anchor that is not " +
			"there; define it with & before its use",
		"endpoints:\n- {role: a, url: a}\n- {role: a, url: a}": "line 2: endpoints[0].role: is not a role; known are " +
			"prefill, decode, both, encode | line 2: endpoints[0].url: is not an engine's address (the scheme is not " +
			"http or https); write http://HOST:PORT | line 3: endpoints[1].role: is not a role; known are prefill, " +
			"decode, both, encode | and 1 more",
		"endpoints: []\n" + strings.Repeat("x", 100) + ": 1": "line 2: [\"" + strings.Repeat("x", 64) +
			"…\"]: unknown field; known are endpoints",
		"a: &a {<<: *a, url: hunter2}\nendpoints: [*a]": "line 1: a: " +
			"unknown field; known are endpoints",
		"endpoints: []\n" + strings.Repeat("#", 8<<20): "line 1: file: " +
			"is too large; at most 8 MiB are read",
		"endpoints:\n- &e {url: http://a:1, role: both, attributes: &a {a: b}}\n- {<<: *e, zone: z}": "line 2: " +
			"endpoints[1].url: is listed twice, first as [0]; list each engine once; one that serves both legs has " +
			"role: both",
	} {
		list, err := file.Parse([]byte(text))
		require.Error(t, err, "%.80q", text)
		assert.Empty(t, list)
		if strings.Contains(text, "<<: *a") {
			assert.Contains(t, err.Error(), want)
		} else {
			assert.Equal(t, want, err.Error(), "%.80q", text)
		}
		assert.NotContains(t, strings.ReplaceAll(err.Error(), "*hunter2", ""), "hunter2", "%.80q", text)
		var fs file.Faults
		require.ErrorAs(t, err, &fs)
	}
}

// A small file of aliases could stand for more than memory holds.
func TestAliasesAreBounded(t *testing.T) {
	var b strings.Builder
	b.WriteString("endpoints:\n- {url: http://a:1, role: both, attributes: &a {")
	for i := range 5000 {
		fmt.Fprintf(&b, "a%d: x,", i)
	}
	b.WriteString("}}\n")
	for i := range 1000 {
		fmt.Fprintf(&b, "- {url: http://b%d:1, role: both, attributes: *a}\n", i)
	}
	_, err := file.Parse([]byte(b.String()))
	require.ErrorContains(t, err, "is larger than a configuration can be, with its aliases followed; use fewer aliases")
}

func TestTheFirstHundredFaultsAreEnough(t *testing.T) {
	_, err := file.Parse([]byte("endpoints:\n- &e {url: http://a:1, role: both}\n" + strings.Repeat("- *e\n", 10_000)))
	var fs file.Faults
	require.ErrorAs(t, err, &fs)
	assert.Len(t, fs, 100)
}

func TestTenThousandEnginesAreRead(t *testing.T) {
	var b strings.Builder
	b.WriteString("endpoints:\n")
	for i := range 10_000 {
		fmt.Fprintf(&b, "  - {url: \"http://10.0.%d.%d:8000\", role: prefill, group: g, zone: z, attributes: "+
			"{bootstrapPort: \"8998\"}}\n", i/250, i%250)
	}
	list, err := file.Parse([]byte(b.String()))
	require.NoError(t, err)
	assert.Len(t, list, 10_000)
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("endpoints:\n- {url: http://a:1, role: both, attributes: {a: b}}\n"))
	f.Add([]byte(`{"endpoints":[{"url":"http://a:1","role":"prefill","group":"g","zone":"z"}]}`))
	f.Add([]byte("a: &a [*a, {<<: *a}]\nendpoints: *a"))
	f.Add([]byte("endpoints:\n- &e {url: http://a:1, role: both}\n- {<<: [*e], url: http://b:1}"))
	f.Fuzz(func(t *testing.T, data []byte) {
		list, err := file.Parse(data)
		if err != nil {
			assert.Nil(t, list)
			fs, ok := errors.AsType[file.Faults](err)
			require.True(t, ok)
			require.NotEmpty(t, fs)
			require.NotContains(t, err.Error(), "\n", "one line in a log")
			return
		}
		seen := map[string]bool{}
		for _, e := range list {
			require.NoError(t, e.Validate())
			require.False(t, seen[e.ID], "an ID twice")
			seen[e.ID] = true
		}
	})
}
