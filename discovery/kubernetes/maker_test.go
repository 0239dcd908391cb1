// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/pdkit/pdkit/discovery"
)

// made returns what a source with these options makes of a cluster with these objects, and what it would tell.
func made(t testing.TB, o Options, objects ...any) ([]discovery.Endpoint, error) {
	t.Helper()
	o.Config = &rest.Config{}
	o = o.clone()
	require.NoError(t, o.check())
	m := newMaker(&o)
	quiet := func() {}
	pods, parts, nodes := m.podTable(quiet, quiet), m.sliceTable(quiet, quiet), zoneTable(quiet, quiet)
	for _, object := range objects {
		var err error
		switch object.(type) {
		case *corev1.Pod:
			err = pods.Add(object)
		case *discoveryv1.EndpointSlice:
			err = parts.Add(object)
		default:
			err = nodes.Add(object)
		}
		require.NoError(t, err)
	}
	var f faults
	list := m.endpoints(stock{pods.snapshot(), parts.snapshot(), nodes.snapshot()}, &f)
	for _, e := range list {
		require.NoError(t, e.Validate())
	}
	return list, f.news()
}

// outcome is a cluster's objects, and what a source with these options makes of them: the endpoints as told writes
// them, and what it leaves out ("" is nothing).
type outcome struct {
	options     Options
	objects     []any
	want, fault string
}

func (r outcome) check(t *testing.T) {
	list, err := made(t, r.options, r.objects...)
	assert.Equal(t, r.want, told(list))
	if r.fault == "" {
		assert.NoError(t, err)
	} else {
		assert.EqualError(t, err, "kubernetes: left out: "+r.fault)
	}
}

// told writes endpoints in one line each, without the fields that are empty.
func told(list []discovery.Endpoint) string {
	lines := make([]string, len(list))
	for i, e := range list {
		parts := []string{e.ID, e.URL.String(), e.Role.String(), e.Phase.String()}
		for _, f := range [][2]string{{"group", e.Group}, {"zone", e.Zone}, {"node", e.Node}, {"model", e.Model},
			{"version", e.Version}} {
			if f[1] != "" {
				parts = append(parts, f[0]+"="+f[1])
			}
		}
		for _, k := range slices.Sorted(maps.Keys(e.Attributes)) {
			parts = append(parts, k+":"+e.Attributes[k])
		}
		lines[i] = strings.Join(parts, " ")
	}
	return strings.Join(lines, "\n")
}

// enginePod is a ready prefill engine.
func enginePod(change ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p-0", UID: "1",
			Labels: map[string]string{"app": "llm", "role": "prefill", "group": "a"}},
		Status: corev1.PodStatus{
			Phase: corev1.PodRunning, PodIP: "10.0.0.1",
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func named(name string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Name = name } }

func labelled(key, value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Labels[key] = value
		if value == "" {
			delete(p.Labels, key)
		}
	}
}

func annotated(key, value string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { metav1.SetMetaDataAnnotation(&p.ObjectMeta, key, value) }
}

func atIP(ip string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Status.PodIP = ip } }

func inPhase(phase corev1.PodPhase) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Status.Phase = phase }
}

func unready(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }

func deleted(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Now()} }

func onNode(p *corev1.Pod) { p.Spec.NodeName = "n1" }

func withPort(name string, port int32) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers = append(p.Spec.Containers,
			corev1.Container{Ports: []corev1.ContainerPort{{Name: name, ContainerPort: port}}})
	}
}

// withSidecar adds an init container, which goes on beside the others if it is to be restarted always.
func withSidecar(name string, port int32, restart corev1.ContainerRestartPolicy) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		c := corev1.Container{Ports: []corev1.ContainerPort{{Name: name, ContainerPort: port}}}
		if restart != "" {
			c.RestartPolicy = &restart
		}
		p.Spec.InitContainers = append(p.Spec.InitContainers, c)
	}
}

var byRole = &PDGroup{
	GroupKey: "group", PrefillLabels: map[string]string{"role": "prefill"},
	DecodeLabels: map[string]string{"role": "decode"},
	EncodeLabels: map[string]string{"encode": "yes"},
}

func TestPodBecomesAnEndpoint(t *testing.T) {
	plain := Options{Selector: Selector{MatchLabels: map[string]string{"app": "llm"}}}
	grouped := Options{Selector: Selector{MatchLabels: map[string]string{"app": "llm"}, PDGroup: byRole}}
	with := func(o Options, change func(*Options)) Options { change(&o); return o }
	port := func(port string) Options { return with(plain, func(o *Options) { o.Port = port }) }

	const at = "default/p-0 http://10.0.0.1:8000"
	for name, c := range map[string]struct {
		options     Options
		pod         *corev1.Pod
		want, fault string
	}{
		"without pdGroup it is of role both": {plain, enginePod(), at + " both ready", ""},
		"prefill":                            {grouped, enginePod(), at + " prefill ready group=a", ""},
		"decode": {grouped, enginePod(labelled("role", "decode")),
			at + " decode ready group=a", ""},
		"labels of neither role": {grouped, enginePod(labelled("role", "router")), "", ""},
		"no role label":          {grouped, enginePod(labelled("role", "")), "", ""},
		"no group label":         {grouped, enginePod(labelled("group", "")), "", ""},
		"not chosen":             {grouped, enginePod(labelled("app", "web")), "", ""},
		"encode": {grouped, enginePod(labelled("role", "x"), labelled("encode", "yes")),
			at + " encode ready group=a", ""},
		"encode and another role is two": {grouped, enginePod(labelled("encode", "yes")),
			at + " prefill ready group=a\ndefault/p-0/encode http://10.0.0.1:8000 encode " +
				"ready group=a", ""},
		"a cluster is before IDs and groups": {with(grouped, func(o *Options) {
			o.Cluster, o.Namespace = "east", "llm"
		}), enginePod(), "east/llm/p-0 http://10.0.0.1:8000 prefill ready group=east/a", ""},
		"and is a group where there are none": {with(plain, func(o *Options) { o.Cluster = "east" }), enginePod(),
			"east/default/p-0 http://10.0.0.1:8000 both ready group=east/", ""},
		"not ready": {plain, enginePod(unready), at + " both not-ready", ""},
		"no conditions yet": {plain, enginePod(func(p *corev1.Pod) { p.Status.Conditions = nil }),
			at + " both not-ready", ""},
		"pending, whatever its condition says": {plain, enginePod(inPhase(corev1.PodPending)),
			at + " both not-ready", ""},
		"lost with its node":          {plain, enginePod(inPhase(corev1.PodUnknown)), at + " both not-ready", ""},
		"deleted, ready still":        {plain, enginePod(deleted), at + " both draining", ""},
		"deleted, not ready any more": {plain, enginePod(deleted, unready), at + " both draining", ""},
		"no address yet":              {plain, enginePod(atIP("")), "", ""},
		"succeeded":                   {plain, enginePod(inPhase(corev1.PodSucceeded)), "", ""},
		"failed":                      {plain, enginePod(inPhase(corev1.PodFailed), deleted), "", ""},
		"IPv6": {plain, enginePod(atIP("FD00::0:1")),
			"default/p-0 http://[fd00::1]:8000 both ready", ""},
		"garbage for an address": {plain, enginePod(atIP("10.0.0.1:80/x")), "",
			`pod "p-0": its address is none`},
		"an address of a zone": {plain, enginePod(atIP("fe80::1%eth0")), "", `pod "p-0": its address is none`},
		"zone label and node": {plain, enginePod(labelled(zoneLabel, "z1"), onNode),
			at + " both ready zone=z1 node=n1", ""},
		"https": {with(plain, func(o *Options) { o.Scheme = "https" }), enginePod(),
			"default/p-0 https://10.0.0.1:8000 both ready", ""},

		"the port named http": {plain, enginePod(withPort("metrics", 9090), withPort("http", 8100)),
			"default/p-0 http://10.0.0.1:8100 both ready", ""},
		"no port named http": {plain, enginePod(withPort("metrics", 9090)), at + " both ready", ""},
		"a port by number": {port("8200"), enginePod(withPort("http", 8100)),
			"default/p-0 http://10.0.0.1:8200 both ready", ""},
		"a port by name": {port("api"), enginePod(withPort("http", 8100), withPort("api", 8300)),
			"default/p-0 http://10.0.0.1:8300 both ready", ""},
		"a port of a sidecar": {port("api"),
			enginePod(withSidecar("api", 8400, corev1.ContainerRestartPolicyAlways)),
			"default/p-0 http://10.0.0.1:8400 both ready", ""},
		"not of what has run before": {port("api"), enginePod(withSidecar("api", 8400, "")), "",
			`pod "p-0": no port of its containers is named "api"`},
		"no port of that name": {port("api"), enginePod(withPort("http", 8100)), "",
			`pod "p-0": no port of its containers is named "api"`},
		"a port that none is": {port("api"), enginePod(withPort("api", 70000)), "",
			`pod "p-0": no port of its containers is named "api"`},
		"what is no engine has no such port": {with(grouped, func(o *Options) { o.Port = "api" }),
			enginePod(labelled("role", "router")), "", ""},

		"annotations": {plain,
			enginePod(annotated("pdkit.dev/bootstrapPort", "8998"), annotated("other.example/x", "y")),
			at + " both ready bootstrapPort:8998", ""},
		"model and version": {plain,
			enginePod(annotated("pdkit.dev/model", "m"), annotated("pdkit.dev/version", "0.32.0")),
			at + " both ready model=m version=0.32.0", ""},
		"variables": {plain,
			enginePod(onNode, annotated("pdkit.dev/zmqAddress", "$(POD_IP):21001"),
				annotated("pdkit.dev/x", "$(POD_NAME)@$(NODE_NAME)$(OTHER)")),
			at + " both ready node=n1 x:p-0@n1$(OTHER) zmqAddress:10.0.0.1:21001", ""},
		"IPv6 before a port": {plain,
			enginePod(atIP("fd00::1"), annotated("pdkit.dev/a", "$(POD_IP):1"), annotated("pdkit.dev/b", "$(POD_IP)")),
			"default/p-0 http://[fd00::1]:8000 both ready a:[fd00::1]:1 b:fd00::1", ""},
		"attributes of all": {with(plain, func(o *Options) {
			o.Attributes = map[string]string{"a": "1", "b": "$(POD_IP)"}
		}), enginePod(), at + " both ready a:1 b:10.0.0.1", ""},
		"an annotation is before them": {with(plain, func(o *Options) {
			o.Attributes = map[string]string{"a": "1", "b": "2"}
		}), enginePod(annotated("pdkit.dev/b", "3")), at + " both ready a:1 b:3", ""},
		"an annotation without a name": {plain, enginePod(annotated("pdkit.dev/", "x")), "",
			`pod "p-0": an annotation of pdkit.dev/ names no attribute`},
		"values are taken as they stand": {plain, enginePod(annotated("pdkit.dev/a", "$(POD_IP")),
			at + " both ready a:$(POD_IP", ""},
	} {
		t.Run(name, outcome{c.options, []any{c.pod}, c.want, c.fault}.check)
	}
}

func TestZonesOfNodes(t *testing.T) {
	o := Options{Selector: Selector{MatchLabels: map[string]string{"app": "llm"}}, Nodes: true}
	node := &metav1.PartialObjectMetadata{
		ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{zoneLabel: "z9"}},
	}
	elsewhere := func(p *corev1.Pod) { p.Spec.NodeName = "n2" }
	list, err := made(t, o, node, enginePod(onNode), enginePod(named("p-1"), onNode, labelled(zoneLabel, "z1")),
		enginePod(named("p-2"), elsewhere))
	require.NoError(t, err)
	assert.Equal(t, `default/p-0 http://10.0.0.1:8000 both ready zone=z9 node=n1
default/p-1 http://10.0.0.1:8000 both ready zone=z1 node=n1
default/p-2 http://10.0.0.1:8000 both ready node=n2`, told(list), "a label of the pod is nearer")
}

func TestAttributesOfOnePodAreNotThoseOfAnother(t *testing.T) {
	o := Options{Selector: Selector{MatchLabels: map[string]string{"app": "llm"}},
		Attributes: map[string]string{"a": "$(POD_NAME)", "b": "1"}}
	list, err := made(t, o, enginePod(annotated("pdkit.dev/b", "2")),
		enginePod(named("p-1"), annotated("pdkit.dev/c", "3")), enginePod(named("p-2")))
	require.NoError(t, err)
	assert.Equal(t, `default/p-0 http://10.0.0.1:8000 both ready a:p-0 b:2
default/p-1 http://10.0.0.1:8000 both ready a:p-1 b:1 c:3
default/p-2 http://10.0.0.1:8000 both ready a:p-2 b:1`, told(list))
}

func TestATableFollowsItsReflector(t *testing.T) {
	changes := 0
	zones := zoneTable(func() { changes++ }, func() {})
	node := func(name, zone string) any {
		return &metav1.PartialObjectMetadata{
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{zoneLabel: zone}},
		}
	}
	now := func(want string, changed bool) {
		t.Helper()
		var rows []string
		for _, r := range zones.snapshot() {
			rows = append(rows, r.name+r.value)
		}
		assert.Equal(t, want, strings.Join(rows, " "))
		assert.Equal(t, changed, changes > 0)
		changes = 0
	}
	require.NoError(t, zones.Replace([]any{}, ""))
	now("", true) // it is known now that there is nothing
	require.NoError(t, zones.Replace([]any{}, ""))
	now("", false)
	require.NoError(t, zones.Add(node("b", "1")))
	require.NoError(t, zones.Add(node("a", "1")))
	now("a1 b1", true)
	require.NoError(t, zones.Update(node("b", "1")))
	now("a1 b1", false)
	require.NoError(t, zones.Delete(node("c", "1")))
	now("a1 b1", false)
	before := zones.snapshot()
	require.NoError(t, zones.Delete(node("a", "1")))
	require.NoError(t, zones.Update(node("b", "2")))
	now("b2", true)
	assert.Equal(t, []string{"a1", "b1"}, []string{before[0].name + before[0].value, before[1].name + before[1].value},
		"what has been read stays")
	require.NoError(t, zones.Replace([]any{node("d", "1"), node("b", "2"), node("d", "2")}, ""))
	now("b2 d1", true) // a name twice would be an ID twice
	row, err := zones.Transformer()(node("e", "1"))
	require.NoError(t, err)
	require.NoError(t, zones.Replace([]any{row}, ""))
	now("e1", true)

	require.Error(t, zones.Add(&corev1.Pod{}), "no node")
	require.Error(t, zones.Delete("nothing"))
	require.Error(t, zones.Replace([]any{"nothing"}, ""))
	now("e1", false)
}

func TestFaultsOfManyPodsAreToldAsOne(t *testing.T) {
	o := Options{Selector: Selector{MatchLabels: map[string]string{"app": "llm"}}, Port: "api"}
	list, err := made(t, o, enginePod(named("c")), enginePod(named("a")), enginePod(named("b"), withPort("api", 1)),
		enginePod(named("d")))
	assert.EqualError(t, err, `kubernetes: left out: pod "a": no port of its containers is named "api", and 2 more`)
	assert.Equal(t, "default/b http://10.0.0.1:1 both ready", told(list))
}

func TestAFaultIsToldOnceUntilItChanges(t *testing.T) {
	var f faults
	round := func(notes ...string) error {
		for i := 0; i < len(notes); i += 2 {
			f.note(notes[i], notes[i+1])
		}
		return f.news()
	}
	assert.NoError(t, round())
	assert.EqualError(t, round("a", "x"), "kubernetes: left out: x")
	assert.NoError(t, round("a", "x"))
	assert.EqualError(t, round("a", "x", "b", "y"), "kubernetes: left out: y")
	assert.EqualError(t, round("a", "z", "b", "y"), "kubernetes: left out: z")
	assert.NoError(t, round("b", "y"))
	assert.EqualError(t, round("a", "z", "b", "y"), "kubernetes: left out: z", "it is new again")
}
