// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// idle are flags of llm-d's sidecar that this one accepts, so that llm-d's manifests work, and that have no effect
// here. The sidecar warns of a value that asks for something. None of these flags changes a response.
var idle = map[string]struct {
	off  []string // the values that ask for nothing, with the default; nil means that all values ask for nothing
	what string
}{
	"enable-p2p-pull": {[]string{"false"},
		"cached prefixes are computed again, not pulled from peers"},
	"enable-speculative-prefill":          {[]string{"false"}, "nothing is computed before it is asked for"},
	"decode-chunk-size":                   {[]string{"0"}, "a response is decoded by one request"},
	"moriio-parallel-decode-wait-timeout": {[]string{"30s"}, "decode is cancelled when prefill has failed"},
	"zap-devel":                           {nil, ""},
	"zap-stacktrace-level":                {nil, ""},
	"zap-time-encoding":                   {nil, ""},
}

// withoutEffect defines the idle flags.
func (f *flags) withoutEffect(fs *flag.FlagSet) {
	for name, x := range idle {
		take := func(value string) error {
			if x.off != nil && !slices.Contains(x.off, value) {
				f.warn("--" + name + " is ignored: " + x.what)
			}
			return nil
		}
		if slices.Contains(x.off, "false") || name == "zap-devel" {
			fs.BoolFunc(name, "of llm-d's sidecar; without effect", take)
		} else {
			fs.Func(name, "of llm-d's sidecar; without effect", take)
		}
	}
}

// synonyms are flags with several names. If the command line has a flag by any of its names, the configuration's value
// is not used.
var synonyms = [][]string{
	{"secure-serving", "secure-proxy"}, {"model-server-port", "vllm-port"}, {"kv-connector", "connector"},
}

// configure sets the flags that the configuration has and the command line does not, as llm-d's sidecar does. A
// configuration is a YAML mapping by flags' names. It may have any flag, and nothing else.
func configure(fs *flag.FlagSet, inline, file string) error {
	name, text := "--configuration", []byte(inline)
	switch {
	case inline != "" && file != "":
		return errors.New("--configuration and --configuration-file exclude each other")
	case file != "":
		name = "--configuration-file"
		var err error
		if text, err = os.ReadFile(file); err != nil {
			return errors.New("--configuration-file cannot be read")
		}
	}
	var settings map[string]yaml.Node
	if err := yaml.Unmarshal(text, &settings); err != nil {
		return fmt.Errorf("%s is not a YAML mapping, or one with a name twice", name)
	}
	given := map[string]bool{}
	fs.Visit(func(f *flag.Flag) { given[f.Name] = true })
	for _, names := range synonyms {
		if slices.ContainsFunc(names, func(n string) bool { return given[n] }) {
			for _, n := range names {
				given[n] = true
			}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(settings)) { // of two names of one setting the newer one comes last
		node := settings[key]
		if fs.Lookup(key) == nil || strings.HasPrefix(key, "configuration") {
			return fmt.Errorf("%s: there is no setting %q", name, key)
		}
		if given[key] {
			continue
		}
		values := []*yaml.Node{&node}
		if node.Kind == yaml.SequenceNode {
			values = node.Content
		}
		for _, v := range values {
			switch {
			case v.Kind != yaml.ScalarNode:
				return fmt.Errorf("%s: %s is neither a value nor a list of values", name, key)
			case v.Tag == "!!null":
			default:
				if err := fs.Set(key, v.Value); err != nil {
					return fmt.Errorf("%s: %s: %w", name, key, err)
				}
			}
		}
	}
	return nil
}
