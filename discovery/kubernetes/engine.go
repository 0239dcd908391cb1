// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/pdkit/pdkit/discovery"
)

// The annotations that are read: annotationPrefix and an attribute's name. Two of them are fields of an endpoint
// instead, and annotationPorts are a pod's ports.
const (
	annotationPrefix  = "pdkit.dev/"
	annotationModel   = annotationPrefix + "model"
	annotationVersion = annotationPrefix + "version"
)

const (
	defaultPortName = "http"
	defaultPort     = 8000
)

// maker makes endpoints from objects. It never changes, so any goroutine may use it.
type maker struct {
	o           *Options
	ids, groups string // prefixes of every ID and every group
	port        int    // 0: look for a port named portName
	portName    string
	varies      bool                      // a value of Options.Attributes contains a variable
	roles       map[string]discovery.Role // of each service; 0 if the pods say it
	join        bool                      // some services need what their pods say
}

func newMaker(o *Options) *maker {
	m := &maker{o: o, ids: o.Namespace + "/", roles: map[string]discovery.Role{}}
	m.port, m.portName, _ = parsePort(o.Port) // check has found no error in it
	if o.Cluster != "" {
		m.groups = o.Cluster + "/"
		m.ids = m.groups + m.ids
	}
	for _, value := range o.Attributes {
		m.varies = m.varies || strings.Contains(value, "$(")
	}
	for _, s := range o.Services {
		m.roles[s.Name] = s.Role
		m.join = m.join || s.Role == 0
	}
	return m
}

// role returns the role that a pod's labels give it, 0 if it is no engine. A pod can have encode and another role; see
// [appendEndpoints].
func (m *maker) role(labels map[string]string) (role discovery.Role) {
	g := m.o.Selector.PDGroup
	if !hasLabels(labels, m.o.Selector.MatchLabels) {
		return 0 // the server sends such a pod only in the event that removes it
	}
	if g == nil {
		return discovery.RoleBoth
	}
	if _, ok := labels[g.GroupKey]; g.GroupKey != "" && !ok {
		return 0
	}
	for _, of := range []struct {
		labels map[string]string
		role   discovery.Role
	}{{g.PrefillLabels, discovery.RolePrefill}, {g.DecodeLabels, discovery.RoleDecode},
		{g.EncodeLabels, discovery.RoleEncode}} {
		if len(of.labels) > 0 && hasLabels(labels, of.labels) {
			role |= of.role
		}
	}
	return role
}

func hasLabels(labels, want map[string]string) bool {
	for k, v := range want {
		if has, ok := labels[k]; !ok || has != v {
			return false
		}
	}
	return true
}

// group returns the group that labels name.
func (m *maker) group(labels map[string]string) string {
	if g := m.o.Selector.PDGroup; g != nil && g.GroupKey != "" {
		return m.groups + labels[g.GroupKey]
	}
	return m.groups
}

func (m *maker) url(host string, port int) *url.URL {
	return &url.URL{Scheme: m.o.Scheme, Host: net.JoinHostPort(host, strconv.Itoa(port))}
}

// variables are the values of the variables in annotations and attributes.
type variables struct{ podIP, podName, nodeName string }

func (v variables) expand(value string) string {
	if !strings.Contains(value, "$(") {
		return value
	}
	beforePort := v.podIP
	if a, err := netip.ParseAddr(v.podIP); err == nil && a.Is6() {
		beforePort = "[" + v.podIP + "]" // so that $(POD_IP):PORT is an address in both families
	}
	return strings.NewReplacer("$(POD_IP):", beforePort+":", "$(POD_IP)", v.podIP, "$(POD_NAME)", v.podName,
		"$(NODE_NAME)", v.nodeName).Replace(value)
}

// annotate sets the fields that annotations, Options.Attributes or the defaults give.
func (m *maker) annotate(e *discovery.Endpoint, annotations map[string]string, v variables) error {
	e.Attributes = m.o.Attributes // shared, since most pods have no attributes of their own
	own := m.varies
	for key := range annotations {
		own = own || strings.HasPrefix(key, annotationPrefix)
	}
	if !own {
		return nil
	}
	e.Attributes = maps.Clone(m.o.Attributes)
	for name, value := range e.Attributes {
		e.Attributes[name] = v.expand(value)
	}
	for key, value := range annotations {
		name, ours := strings.CutPrefix(key, annotationPrefix)
		switch {
		case !ours:
		case name == "" || strings.Contains(name, "/"):
			return errors.New("an annotation of " + annotationPrefix + " names no attribute")
		case key == annotationPorts:
		case key == annotationModel:
			e.Model = v.expand(value)
		case key == annotationVersion:
			e.Version = v.expand(value)
		default:
			if e.Attributes == nil {
				e.Attributes = map[string]string{}
			}
			e.Attributes[name] = v.expand(value)
		}
	}
	return nil
}

// appendEndpoints appends an engine. One that encodes and also serves a leg becomes two endpoints, since no role says
// both.
func appendEndpoints(list []discovery.Endpoint, e discovery.Endpoint) []discovery.Endpoint {
	leg, encode := e.Role&^discovery.RoleEncode, e.Role&discovery.RoleEncode
	if leg != 0 {
		e.Role = leg
		list = append(list, e)
	}
	if encode != 0 {
		e.Role = encode
		if leg != 0 {
			e.ID += "/encode"
		}
		list = append(list, e)
	}
	return list
}

func sameEndpoints(a, b []discovery.Endpoint) bool {
	return slices.EqualFunc(a, b, func(a, b discovery.Endpoint) bool { return sameEndpoint(&a, &b) })
}

// sameEndpoint reports whether two endpoints are equal.
func sameEndpoint(a, b *discovery.Endpoint) bool {
	sameURL := a.URL == b.URL || a.URL != nil && b.URL != nil && *a.URL == *b.URL
	return sameURL && a.ID == b.ID && a.Role == b.Role && a.Phase == b.Phase && a.Group == b.Group &&
		a.Zone == b.Zone && a.Node == b.Node &&
		a.Model == b.Model && a.Version == b.Version && maps.Equal(a.Attributes, b.Attributes)
}

// zoneTable returns a table of nodes' zones. The functions are those of [table].
func zoneTable(changed, listed func()) *table[string] {
	return &table[string]{convert: nodeZone, same: func(a, b string) bool { return a == b }, changed: changed,
		listed: listed}
}

// nodeZone returns a node's zone, all that is kept of a node.
func nodeZone(object any) (string, bool) {
	node, ok := object.(*metav1.PartialObjectMetadata)
	if !ok {
		return "", false
	}
	return node.Labels[zoneLabel], true
}

func quoted(kind, name string, err error) string { return fmt.Sprintf("%s %q: %v", kind, name, err) }
