// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/pdkit/pdkit/discovery"
)

// The annotations that are read: annotationPrefix and an attribute's name, but for two that are fields of an endpoint.
const (
	annotationPrefix  = "pdkit.dev/"
	annotationModel   = annotationPrefix + "model"
	annotationVersion = annotationPrefix + "version"
)

const (
	defaultPortName = "http"
	defaultPort     = 8000
)

// maker makes endpoints of objects. It does not change, so that any goroutine may use it.
type maker struct {
	o           *Options
	ids, groups string // before every ID and group
	port        int    // 0: portName says it
	portName    string
	varies      bool                      // an attribute of all endpoints contains a variable
	roles       map[string]discovery.Role // of services; 0 where the pods say it
	join        bool                      // the pods say what their services do not
}

func newMaker(o *Options) *maker {
	m := &maker{o: o, ids: o.Namespace + "/", roles: map[string]discovery.Role{}}
	m.port, m.portName, _ = parsePort(o.Port) // checked before
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

// role is what the labels of a pod say that it is for: 0 for no engine. It may be encode and another role at once,
// which no endpoint is: see [appendEndpoints].
func (m *maker) role(labels map[string]string) (role discovery.Role) {
	g := m.o.Selector.PDGroup
	if !hasLabels(labels, m.o.Selector.MatchLabels) {
		return 0 // the server has left it out, but for the labels it had
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

// group is the group that labels name.
func (m *maker) group(labels map[string]string) string {
	if g := m.o.Selector.PDGroup; g != nil && g.GroupKey != "" {
		return m.groups + labels[g.GroupKey]
	}
	return m.groups
}

func (m *maker) url(host string, port int) *url.URL {
	return &url.URL{Scheme: m.o.Scheme, Host: net.JoinHostPort(host, strconv.Itoa(port))}
}

// variables are what values of annotations and attributes may contain.
type variables struct{ podIP, podName, nodeName string }

func (v variables) expand(value string) string {
	if !strings.Contains(value, "$(") {
		return value
	}
	beforePort := v.podIP
	if a, err := netip.ParseAddr(v.podIP); err == nil && a.Is6() {
		beforePort = "[" + v.podIP + "]" // $(POD_IP):PORT is an address of that port in both families
	}
	return strings.NewReplacer("$(POD_IP):", beforePort+":", "$(POD_IP)", v.podIP, "$(POD_NAME)", v.podName,
		"$(NODE_NAME)", v.nodeName).Replace(value)
}

// annotate sets what annotations say, and what is said of all endpoints.
func (m *maker) annotate(e *discovery.Endpoint, annotations map[string]string, v variables) error {
	e.Attributes = m.o.Attributes // shared, as most pods say nothing of their own
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

// appendEndpoints appends an engine. One that encodes and serves a leg, too, is two endpoints: no role says both.
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

// sameEndpoint reports whether nothing of an endpoint is different.
func sameEndpoint(a, b *discovery.Endpoint) bool {
	sameURL := a.URL == b.URL || a.URL != nil && b.URL != nil && *a.URL == *b.URL
	return sameURL && a.ID == b.ID && a.Role == b.Role && a.Phase == b.Phase && a.Group == b.Group &&
		a.Zone == b.Zone && a.Node == b.Node &&
		a.Model == b.Model && a.Version == b.Version && maps.Equal(a.Attributes, b.Attributes)
}

// nodeZone is what is kept of a node.
func nodeZone(object any) (string, bool) {
	node, ok := object.(*metav1.PartialObjectMetadata)
	if !ok {
		return "", false
	}
	return node.Labels[zoneLabel], true
}

func quoted(kind, name string, err error) string { return fmt.Sprintf("%s %q: %v", kind, name, err) }
