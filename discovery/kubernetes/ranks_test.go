// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/pdkit/pdkit/connector/moriio"
	"github.com/pdkit/pdkit/discovery"
)

// ofGroup makes a pod the one of this number in a group of a LeaderWorkerSet of two pods.
func ofGroup(group string, index int) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		labelled(lwsName, "set")(p)
		labelled(lwsGroup, group)(p)
		labelled(lwsWorker, strconv.Itoa(index))(p)
		annotated(lwsSize, "2")(p)
	}
}

func TestEachPortOfAPodIsARank(t *testing.T) {
	plain := Options{Selector: Selector{MatchLabels: map[string]string{"app": "llm"}}}
	two := plain
	two.Ports = []int{8000, 8001}
	const first, second = "default/p-0:8000 http://10.0.0.1:8000 both ready ",
		"default/p-0:8001 http://10.0.0.1:8001 both ready "
	const ranks01 = first + "dpSize:2 dpSizeLocal:1 dpStartRank:0\n" + second + "dpSize:2 dpSizeLocal:1 dpStartRank:1"
	for name, c := range map[string]struct {
		options     Options
		pod         *corev1.Pod
		want, fault string
	}{
		"by the options": {two, enginePod(), ranks01, ""},
		"by the pod":     {plain, enginePod(annotated("pdkit.dev/ports", "8000-8001")), ranks01, ""},
		"the pod's are before": {two, enginePod(annotated("pdkit.dev/ports", "9000")),
			"default/p-0:9000 http://10.0.0.1:9000 both ready", ""},
		"no list": {two, enginePod(annotated("pdkit.dev/ports", "8000-")), "",
			`pod "p-0": annotation pdkit.dev/ports is not a list of ports like 8000-8007`},
		"a port without an engine, by llm-d's annotation": {two,
			enginePod(annotated("llm-d.ai/active-ports", "x, 8001,8001,9000")),
			second + "dpSize:2 dpSizeLocal:1 dpStartRank:1", ""},
		"and by its older name": {two, enginePod(annotated("inference.networking.k8s.io/active-ports", "8000")),
			first + "dpSize:2 dpSizeLocal:1 dpStartRank:0", ""},
		"which says nothing of a pod's only port": {plain, enginePod(annotated("llm-d.ai/active-ports", "8001")),
			"default/p-0 http://10.0.0.1:8000 both ready", ""},
		"none has an engine": {two, enginePod(annotated("llm-d.ai/active-ports", "")), "", ""},
		"an attribute of one port": {two, enginePod(annotated("pdkit.dev/bootstrapPort", "8998"),
			annotated("pdkit.dev/bootstrapPort.8001", "8999")),
			first + "bootstrapPort:8998 dpSize:2 dpSizeLocal:1 dpStartRank:0\n" +
				second + "bootstrapPort:8999 dpSize:2 dpSizeLocal:1 dpStartRank:1", ""},
		"engines that are no ranks": {two, enginePod(annotated("pdkit.dev/dpSize", "1")),
			first + "dpSize:1\n" + second + "dpSize:1", ""},
		"sizes as the engine's flags have them": {two, enginePod(annotated("pdkit.dev/dpSize", "16"),
			annotated("pdkit.dev/dpSizeLocal", "2")),
			first + "dpSize:16 dpSizeLocal:1 dpStartRank:0\n" + second + "dpSize:16 dpSizeLocal:1 dpStartRank:1", ""},
		"encode and another role": {Options{Selector: Selector{PDGroup: byRole}, Ports: []int{8000}},
			enginePod(labelled("encode", "yes")), "default/p-0:8000 http://10.0.0.1:8000 prefill ready group=a\n" +
				"default/p-0:8000/encode http://10.0.0.1:8000 encode ready group=a", ""},

		"the second pod of a group": {two, enginePod(ofGroup("0", 1)),
			first + "dpSize:4 dpSizeLocal:1 dpStartRank:2\n" + second + "dpSize:4 dpSizeLocal:1 dpStartRank:3", ""},
		"the first, which is one rank of two": {plain, enginePod(ofGroup("0", 0), annotated("pdkit.dev/dpSize", "8")),
			"default/p-0 http://10.0.0.1:8000 both ready dpSize:8", ""},
		"the second, with one port for its ranks": {plain, enginePod(ofGroup("0", 1),
			annotated("pdkit.dev/dpSize", "16"), annotated("pdkit.dev/dpSizeLocal", "8")),
			"default/p-0 http://10.0.0.1:8000 both ready dpSize:16 dpSizeLocal:8 dpStartRank:8", ""},
		"whose size is the pod's": {plain, enginePod(ofGroup("0", 1), annotated("pdkit.dev/dpSize", "8")),
			"default/p-0 http://10.0.0.1:8000 both ready dpSize:8 dpStartRank:8", ""},
		"whose ports are counted from its own first rank": {plain, enginePod(ofGroup("0", 1),
			annotated("pdkit.dev/dpSize", "8"), annotated("pdkit.dev/dpStartRank", "0")),
			"default/p-0 http://10.0.0.1:8000 both ready dpSize:8 dpStartRank:0", ""},
		"and so are several ports": {two, enginePod(ofGroup("0", 1), annotated("pdkit.dev/dpStartRank", "0")),
			first + "dpSize:4 dpSizeLocal:1 dpStartRank:0\n" + second + "dpSize:4 dpSizeLocal:1 dpStartRank:1", ""},
		"no rank": {two, enginePod(annotated("pdkit.dev/dpStartRank", "x")), "",
			`pod "p-0": attribute dpStartRank is not the number of a rank`},
		"no worker": {two, enginePod(labelled(lwsWorker, "x")), ranks01, ""},
	} {
		t.Run(name, outcome{c.options, []any{c.pod}, c.want, c.fault}.check)
	}
}

// A pod's ports come after those of a pod whose name is longer.
func TestRanksAreListedInTheOrderOfTheirIDs(t *testing.T) {
	o := Options{Selector: Selector{MatchLabels: map[string]string{"app": "llm"}}, Ports: []int{8000, 8001}}
	list, err := made(t, o, enginePod(named("p")), enginePod(named("p-0"), atIP("10.0.0.2")))
	require.NoError(t, err)
	ids := make([]string, len(list))
	for i, e := range list {
		ids[i] = e.ID
	}
	assert.Equal(t, []string{"default/p-0:8000", "default/p-0:8001", "default/p:8000", "default/p:8001"}, ids)
}

// MoRIIO's prefill engine must know the hosts of all pods of the decode engine, which no template of a pod can say.
func TestAnEngineOfSeveralPodsNamesThem(t *testing.T) {
	o := Options{Selector: Selector{MatchLabels: map[string]string{"app": "llm"}, PDGroup: byRole}}
	leader := enginePod(named("set-0"), ofGroup("0", 0))
	worker := enginePod(named("set-0-1"), atIP("10.0.0.2"), ofGroup("0", 1))
	other := enginePod(named("set-1"), atIP("10.0.0.3"), ofGroup("1", 0))
	const a, b, c = "default/set-0 http://10.0.0.1:8000 prefill ready group=a",
		"\ndefault/set-0-1 http://10.0.0.2:8000 prefill ready group=a",
		"\ndefault/set-1 http://10.0.0.3:8000 prefill ready group=a"
	const pods = " pods:10.0.0.1,10.0.0.2"
	headless := enginePod(named("set-0-1"), atIP("10.0.0.2"), ofGroup("0", 1), labelled("role", ""))
	for name, c := range map[string]outcome{
		"all pods are known": {o, []any{leader, worker, other}, a + pods + b + pods + c, ""},
		"one has no address yet": {o, []any{leader, enginePod(named("set-0-1"), atIP(""), ofGroup("0", 1))}, a,
			""},
		"one is no endpoint of itself": {o, []any{leader, headless}, a + pods, ""},
		"an annotation names them": {o, []any{enginePod(named("set-0"), ofGroup("0", 0),
			annotated("pdkit.dev/pods", "x,y")), worker}, a + " pods:x,y" + b + pods, ""},
	} {
		t.Run(name, c.check)
	}

	for name, c := range map[string]outcome{
		"pods that serve their own ranks": {o, []any{enginePod(named("set-0"), ofGroup("0", 0),
			annotated("pdkit.dev/dpSize", "8")), enginePod(named("set-0-1"), atIP("10.0.0.2"), ofGroup("0", 1),
			annotated("pdkit.dev/dpSize", "8"))}, a + " dpSize:16 dpSizeLocal:8" + pods + b +
			" dpSize:16 dpSizeLocal:8 dpStartRank:8" + pods, ""},
		"a pod that serves the ranks of all": {o, []any{enginePod(named("set-0"), ofGroup("0", 0),
			annotated("pdkit.dev/dpSize", "16")), headless}, a + " dpSize:16" + pods, ""},
	} {
		t.Run(name, c.check)
	}

	o.Attributes = map[string]string{"dpSize": "4", "dpSizeLocal": "2"}
	list, err := made(t, o, enginePod(ofGroup("0", 0), labelled("role", "decode")),
		enginePod(named("p-0-1"), atIP("10.0.0.2"), ofGroup("0", 1), labelled("role", "decode")))
	require.NoError(t, err)
	k, err := moriio.New(nil)
	require.NoError(t, err)
	for _, e := range list {
		assert.NoError(t, k.CheckEndpoint(e))
	}
}

func TestPortsOfServicesAreRanks(t *testing.T) {
	prefill := Options{Services: []Service{{Name: "prefill", Role: discovery.RolePrefill}}}
	with := func(change func(*Options)) Options { o := prefill; change(&o); return o }
	given := with(func(o *Options) { o.Ports = []int{8000, 8001} })
	api := with(func(o *Options) { o.Port = "api" })
	joined := Options{Selector: Selector{MatchLabels: map[string]string{"app": "llm"}, PDGroup: byRole},
		Services: []Service{{Name: "prefill"}}}
	joinedGiven := joined
	joinedGiven.Ports = given.Ports
	ready := of("p-0", "10.0.0.1", isReady)
	alike := withPorts(endpointSlice("s1", ready), slicePort("rank-1", 8001), slicePort("rank-0", 8000))
	const zero, one = " dpSize:2 dpSizeLocal:1 dpStartRank:0", " dpSize:2 dpSizeLocal:1 dpStartRank:1"
	const ranks = "default/p-0:8000 http://10.0.0.1:8000 prefill ready" + zero +
		"\ndefault/p-0:8001 http://10.0.0.1:8001 prefill ready" + one
	const grouped = "default/p-0:8000 http://10.0.0.1:8000 prefill ready group=a" + zero +
		"\ndefault/p-0:8001 http://10.0.0.1:8001 prefill ready group=a" + one
	const several = `service "prefill": it has several ports: want one of them in Options.Port, or Options.Ports`
	for name, c := range map[string]outcome{
		"by the options": {given, []any{endpointSlice("s1", ready)}, ranks, ""},
		"named alike":    {prefill, []any{alike}, ranks, ""},
		"named alike but one": {prefill, []any{withPorts(endpointSlice("s1", ready), slicePort("rank-0", 8000),
			slicePort("rank-1", 8001), slicePort("metrics", 9090))}, "", several},
		"not all of one name": {prefill, []any{withPorts(endpointSlice("s1", ready), slicePort("a-0", 8000),
			slicePort("b-1", 8001))}, "", several},
		"named http-N beside others": {prefill, []any{withPorts(endpointSlice("s1", ready), slicePort("http-0", 8000),
			slicePort("http-1", 8001), slicePort("metrics", 9090))}, ranks, ""},
		"named as wanted": {api, []any{withPorts(endpointSlice("s1", ready), slicePort("api-0", 8000),
			slicePort("api-1", 8001), slicePort("http", 9090))}, ranks, ""},
		"one of them, as wanted": {with(func(o *Options) { o.Port = "rank-1" }), []any{alike},
			"default/p-0 http://10.0.0.1:8001 prefill ready", ""},
		"written by hand": {given, []any{endpointSlice("s1", of("", "10.0.0.9", isReady))},
			"default/prefill/10.0.0.9:8000 http://10.0.0.9:8000 prefill ready" + zero +
				"\ndefault/prefill/10.0.0.9:8001 http://10.0.0.9:8001 prefill ready" + one, ""},
		"a pod of two services": {Options{Ports: given.Ports, Services: []Service{prefill.Services[0],
			{Name: "decode", Role: discovery.RoleDecode}}},
			[]any{endpointSlice("s1", ready), inService("decode", endpointSlice("s2", ready))},
			"default/p-0:8000 http://10.0.0.1:8000 both ready" + zero +
				"\ndefault/p-0:8001 http://10.0.0.1:8001 both ready" + one, ""},

		"whose pods say the rest": {joined, []any{alike, enginePod()}, grouped, ""},
		"and the ports, too": {joined, []any{endpointSlice("s1", ready),
			enginePod(annotated("pdkit.dev/ports", "8000-8001"))}, grouped, ""},
		"by the options, and one has no engine": {joinedGiven, []any{endpointSlice("s1", ready),
			enginePod(annotated("llm-d.ai/active-ports", "8001"))},
			"default/p-0:8001 http://10.0.0.1:8001 prefill ready group=a" + one, ""},
		"of the second pod of a group": {joined, []any{endpointSlice("s1", ready),
			enginePod(ofGroup("0", 1), annotated("pdkit.dev/dpSize", "8"))},
			"default/p-0 http://10.0.0.1:8100 prefill ready group=a dpSize:8 dpStartRank:8", ""},
		"a pod that makes no sense": {joined, []any{alike, enginePod(annotated("pdkit.dev/dpStartRank", "-1"))}, "",
			`pod "p-0": attribute dpStartRank is not the number of a rank`},
	} {
		t.Run(name, c.check)
	}
}
