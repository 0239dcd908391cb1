// SPDX-License-Identifier: Apache-2.0

package launch_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
)

// launched is a rule about the settings with which an engine of a connector is launched.
type launched struct {
	rule, connector, settings string

	engine    string   // its role, URL and attributes: "prefill http://h:8100 tpSize=8"; "" is plainPrefill
	beside    []string // the other engines of its model
	version   string
	index     int
	gateway   string
	cpu       bool
	resources config.Resources

	want  []string // whole lines of lines(), which stand one below the other in each text
	has   []string // parts of lines()
	not   []string
	fails string // a part of the error; the others are not looked at
}

// plainPrefill is the engine of most rules.
const plainPrefill = "prefill http://10.0.0.1:8100"

// everyLimit are all resources of a ModelServer.
var everyLimit = config.Resources{MaxMemory: "8Gi", MaxDisk: "1Ti", MaxBandwidth: "1G"}

func TestEnginesAreLaunchedByTheseRules(t *testing.T) {
	for _, table := range [][]launched{nixlEngines, storeEngines, mooncakeEngines, peerEngines, multiEngines} {
		kept(t, table)
	}
}

func TestPasswordsAreNeverRendered(t *testing.T) { kept(t, storePasswords) }

func TestNoSettingIsDroppedInSilenceAndNoKeyShown(t *testing.T) { kept(t, keysOfTensorRT) }

// kept checks the rules of a table.
func kept(t *testing.T, table []launched) {
	t.Helper()
	for _, c := range table {
		t.Run(c.connector+": "+c.rule, func(t *testing.T) {
			s, err := c.render(t)
			if c.fails != "" {
				require.ErrorContains(t, err, c.fails)
				return
			}
			require.NoError(t, err)
			text := lines(s)
			for _, want := range c.want {
				assert.Contains(t, text, "\n"+want+"\n")
			}
			for _, part := range c.has {
				assert.Contains(t, text, part)
			}
			for _, part := range c.not {
				assert.NotContains(t, text, part)
			}
		})
	}
}

// On one host each engine has its own port; an engine with several data-parallel ranks has one for each rank. Of the
// offloading tier the gateway needs to know only P's.
func TestEnginesOfOneHostHavePortsOfTheirOwn(t *testing.T) {
	for _, c := range []struct {
		connector, variable string
		engines             []string
		ports               []string
	}{
		{"nixl", "VLLM_NIXL_SIDE_CHANNEL_", []string{
			"prefill http://10.0.0.1:8000", "prefill http://10.0.0.1:8001 dpSize=2", "decode http://10.0.0.2:8000",
			"decode http://10.0.0.1:8002", "decode http://10.0.0.1:8003 sideChannelPort=5603 sideChannelHost=10.0.0.1",
			"both http://10.0.0.1:8004", "decode http://[fd00::1]:8000",
		}, []string{"10.0.0.1 5600", "10.0.0.1 5601", "10.0.0.2 5600", "10.0.0.1 5604", "10.0.0.1 5603",
			"10.0.0.1 5605", "fd00::1 5600"}},
		{"offload-p2p", "VLLM_P2P_SIDE_CHANNEL_", []string{
			"prefill http://h:8100 dpSize=2", "decode http://h:8200", "decode http://h:8202 p2pPort=7780",
			"decode http://h:8201", "decode http://g:8200",
		}, []string{"h 7777", "h 7779", "h 7780", "h 7781", "g 7777"}},
	} {
		var engines []discovery.Endpoint
		for _, e := range c.engines {
			engines = append(engines, described(t, e))
		}
		for i, want := range c.ports {
			s := render(t, c.connector, `{}`, launch.Target{Endpoint: engines[i], Engines: engines})
			assert.Equal(t, want, env(s, c.variable+"HOST")+" "+env(s, c.variable+"PORT"), c.engines[i])
		}
	}
}

func (c *launched) render(t *testing.T) (launch.Settings, error) {
	t.Helper()
	version, err := launch.ParseVersion(c.version)
	require.NoError(t, err)
	own := cmp.Or(c.engine, plainPrefill)
	target := launch.Target{Endpoint: described(t, own), Index: c.index, Model: "m", Version: version,
		Resources: c.resources, Gateway: c.gateway, CPU: c.cpu}
	for _, e := range append([]string{own}, c.beside...) {
		target.Engines = append(target.Engines, described(t, e))
	}
	return open(t, c.connector, c.settings).Render(target)
}

// described is an engine as [launched.engine] has it.
func described(t *testing.T, text string) discovery.Endpoint {
	t.Helper()
	fields := strings.Fields(text)
	role, err := discovery.ParseRole(fields[0])
	require.NoError(t, err)
	e := engine(t, fields[1], role)
	for _, attribute := range fields[2:] {
		name, value, _ := strings.Cut(attribute, "=")
		e.Attributes[name] = value
	}
	return e
}

// lines writes settings one below the other: the engine, its environment, arguments and kv_transfer_config, the paths
// of notes and of settings without effect, then the files, the companions and the notes' texts.
func lines(s launch.Settings) string {
	var b strings.Builder
	list := func(name string, items []string) {
		b.WriteString(strings.Join(append([]string{name}, items...), " ") + "\n")
	}
	b.WriteString("\n")
	list("engine", []string{s.Engine})
	var env, notes, idle []string
	for _, e := range s.Env {
		env = append(env, e.Name+"="+e.Value)
	}
	for _, n := range s.Notes {
		if n.NoEffect {
			idle = append(idle, n.Path)
		} else {
			notes = append(notes, n.Path)
		}
	}
	list("env", env)
	list("args", s.Args)
	if s.KVTransfer != nil {
		list("kv", members(s.KVTransfer))
	}
	list("notes", notes)
	list("idle", idle)
	for _, f := range s.Files {
		fmt.Fprintf(&b, "file %s\n%s", f.Name, f.Content)
	}
	for _, c := range s.Companions {
		fmt.Fprintf(&b, "beside %s, one for each engine: %t\n%s\n", c.Name, c.PerEngine, strings.Join(c.Command, " "))
	}
	for _, n := range s.Notes {
		fmt.Fprintf(&b, "# %s: %s\n", n.Path, n.Text)
	}
	return b.String()
}

// members are those of a kv_transfer_config: its class and role, then the others as NAME=JSON, without kv_ in front.
func members(t *launch.KVTransfer) []string {
	var all map[string]json.RawMessage
	if err := json.Unmarshal([]byte(t.JSON()), &all); err != nil {
		return []string{err.Error()}
	}
	list := []string{t.Connector, t.Role}
	delete(all, "kv_connector")
	delete(all, "kv_role")
	for _, name := range slices.Sorted(maps.Keys(all)) {
		list = append(list, strings.TrimPrefix(name, "kv_")+"="+string(all[name]))
	}
	return list
}
