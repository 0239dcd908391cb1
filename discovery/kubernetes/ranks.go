// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/discovery"
)

// The annotations that say at which ports a pod's engines listen. annotationPorts gives the list for one pod. The
// others are those of llm-d and of the Gateway API's inference extension (pkg/epp/datastore of llm-d-router ebab6879):
// of the listed ports those that have an engine now.
const annotationPorts = annotationPrefix + "ports"

var activePorts = []string{"llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports"}

// The labels and the annotation of a LeaderWorkerSet's pods. The leader's worker index is 0.
const (
	lwsName   = "leaderworkerset.sigs.k8s.io/name"
	lwsGroup  = "leaderworkerset.sigs.k8s.io/group-index"
	lwsWorker = "leaderworkerset.sigs.k8s.io/worker-index"
	lwsSize   = "leaderworkerset.sigs.k8s.io/size"
)

// maxWorkers bounds the pods of one group. No engine has more.
const maxWorkers = 1024

// The attributes that this package adds, by the names that connectors read. attrPods names the hosts of all pods of an
// engine.
const (
	attrDPSize      = "dpSize"
	attrDPSizeLocal = "dpSizeLocal"
	attrDPStartRank = "dpStartRank"
	attrPods        = "pods"
)

// worker is a pod's place in the group of a LeaderWorkerSet.
type worker struct {
	group string
	index int
	size  int    // pods in the group; 0 if it is not known
	host  string // its address, "" if it has none
}

// workerOf returns nil for a pod of no LeaderWorkerSet.
func workerOf(p *corev1.Pod) *worker {
	labels := p.Labels
	text, ok := labels[lwsWorker]
	if !ok {
		return nil
	}
	index, err := strconv.ParseUint(text, 10, 16)
	if err != nil || index >= maxWorkers {
		return nil
	}
	w := &worker{group: labels[lwsName] + "/" + labels[lwsGroup], index: int(index), host: podHost(p)}
	size, err := strconv.ParseUint(p.Annotations[lwsSize], 10, 16)
	if err == nil && size > index && size <= maxWorkers {
		w.size = int(size)
	}
	return w
}

// ports are where a pod's engines listen.
type ports struct {
	// A port for each rank, in the order of the ranks; 0 where the rank has no engine now. Never changed.
	numbers []int
	ranks   bool // there may be several, so IDs tell the port
}

func onePort(port int) ports { return ports{numbers: []int{port}} }

// portNotes are what annotations say of ports; nil is nothing.
type portNotes struct {
	own, active config.Ports
	filtered    bool // only those of active have an engine
}

func portNotesOf(annotations map[string]string) (n *portNotes, err error) {
	if text, ok := annotations[annotationPorts]; ok {
		own, err := config.ParsePorts(text)
		if err != nil {
			return nil, errors.New("annotation " + annotationPorts + " is not a list of ports like 8000-8007")
		}
		n = &portNotes{own: own}
	}
	for _, name := range activePorts {
		if text, ok := annotations[name]; ok {
			n = cmp.Or(n, &portNotes{})
			n.filtered = true
			for part := range strings.SplitSeq(text, ",") {
				port, _ := config.ParsePorts(part) // what is no port is not active, as there
				n.active = append(n.active, port...)
			}
			break
		}
	}
	return n, nil
}

// of returns a pod's ports, where all pods have the given ones.
func (n *portNotes) of(all ports) ports {
	if n == nil {
		return all
	}
	if n.own != nil {
		all = ports{n.own, true}
	}
	if !all.ranks || !n.filtered {
		return all
	}
	all.numbers = slices.Clone(all.numbers)
	for i, port := range all.numbers {
		if !slices.Contains(n.active, port) {
			all.numbers[i] = 0
		}
	}
	return all
}

func samePortNotes(a, b *portNotes) bool {
	return a == b || a != nil && b != nil && a.filtered == b.filtered && slices.Equal(a.own, b.own) &&
		slices.Equal(a.active, b.active)
}

func sameWorker(a, b *worker) bool { return a == b || a != nil && b != nil && *a == *b }

// spread appends the endpoints of one pod: one for each port, with the attributes of the rank behind it. The ID of a
// rank's endpoint is the pod's with the port. If there is one port, e may have its URL already.
func (m *maker) spread(list []discovery.Endpoint, e discovery.Endpoint, host string, p ports,
	w *worker) ([]discovery.Endpoint, error) {
	if w == nil {
		w = &worker{}
	}
	start, err := startRank(e.Attributes, len(p.numbers), w)
	if err != nil {
		return list, err
	}
	if !p.ranks {
		if e.URL == nil {
			e.URL = m.url(host, p.numbers[0])
		}
		if start > 0 && e.Attribute(attrDPStartRank) == "" {
			e.Attributes = with(e.Attributes, attrDPStartRank, strconv.Itoa(start))
		}
		return append(list, e), nil
	}
	// The attribute decides whether rank 0 alone is a whole engine, so it must be there.
	size := strconv.Itoa(max(w.size*len(p.numbers), start+len(p.numbers)))
	for i, port := range p.numbers {
		if port == 0 {
			continue
		}
		rank := e
		rank.ID += ":" + strconv.Itoa(port)
		rank.URL = m.url(host, port)
		rank.Attributes = ofPort(e.Attributes, port)
		if alone := rank.Attributes[attrDPSize] == "1"; !alone && len(p.numbers) > 1 {
			rank.Attributes[attrDPSize] = cmp.Or(rank.Attributes[attrDPSize], size)
			rank.Attributes[attrDPSizeLocal] = "1"
			rank.Attributes[attrDPStartRank] = strconv.Itoa(start + i)
		}
		list = append(list, rank)
	}
	return list, nil
}

// startRank returns the number of a pod's first rank among all ranks of its engine: what the attribute says, else the
// ranks of the pods before it in its group.
func startRank(attributes map[string]string, ports int, w *worker) (int, error) {
	number := func(name string) (int, error) {
		n, err := strconv.ParseUint(strings.TrimSpace(attributes[name]), 10, 16)
		return int(n), err
	}
	if attributes[attrDPStartRank] != "" {
		start, err := number(attrDPStartRank)
		if err != nil {
			return 0, errors.New("attribute " + attrDPStartRank + " is not the number of a rank")
		}
		return start, nil
	}
	if ports > 1 || w.index == 0 {
		return w.index * ports, nil
	}
	// If both are given, dpSize counts the ranks of all pods. The connectors refuse values that are none.
	size, _ := number(attrDPSize)
	local, _ := number(attrDPSizeLocal)
	return w.index * cmp.Or(local, size), nil
}

// ofPort returns a copy of the attributes for the engine at one port: NAME.PORT is the attribute NAME of this port
// alone.
func ofPort(all map[string]string, port int) map[string]string {
	own := make(map[string]string, len(all)+3)
	for name, value := range all {
		if base, of, ok := strings.Cut(name, "."); ok && base != "" {
			if n, err := strconv.ParseUint(of, 10, 16); err == nil {
				if int(n) == port {
					own[base] = value
				}
				continue
			}
		}
		if _, given := own[name]; !given {
			own[name] = value
		}
	}
	return own
}

func with(all map[string]string, name, value string) map[string]string {
	all = maps.Clone(all)
	if all == nil {
		all = map[string]string{}
	}
	all[name] = value
	return all
}

// lwsGroups are what is known of the groups of LeaderWorkerSets, by worker.group.
type lwsGroups map[string]*lwsGroupOfPods

type lwsGroupOfPods struct {
	hosts   []string // of the pods, by worker index; "" where a pod is not known
	engines int      // pods that are endpoints of their own
}

func lwsGroupsOf(pods rows[*pod]) (all lwsGroups) {
	for _, r := range pods {
		w := r.value.worker
		if w == nil || w.size < 2 || w.host == "" {
			continue
		}
		if all == nil {
			all = lwsGroups{}
		}
		g := all[w.group]
		if g == nil || len(g.hosts) != w.size {
			g = &lwsGroupOfPods{hosts: make([]string, w.size)}
			all[w.group] = g
		}
		g.hosts[w.index] = w.host
		if len(r.value.endpoints) > 0 {
			g.engines++
		}
	}
	return all
}

// complete adds to an engine with one port what the other pods of its group tell. What has a port for each rank needs
// it not: each rank is addressed by its own endpoint.
func (all lwsGroups) complete(e discovery.Endpoint, w *worker) discovery.Endpoint {
	if w == nil || all[w.group] == nil || len(all[w.group].hosts) != w.size {
		return e
	}
	g := all[w.group]
	size, err := strconv.ParseUint(strings.TrimSpace(e.Attribute(attrDPSize)), 10, 16)
	if err == nil && g.engines > 1 && e.Attribute(attrDPSizeLocal) == "" {
		// dpSize counts the ranks of this pod, since others serve their own.
		e.Attributes = with(e.Attributes, attrDPSizeLocal, strconv.Itoa(int(size)))
		e.Attributes[attrDPSize] = strconv.Itoa(int(size) * w.size)
	}
	if !slices.Contains(g.hosts, "") && e.Attribute(attrPods) == "" {
		e.Attributes = with(e.Attributes, attrPods, strings.Join(g.hosts, ","))
	}
	return e
}
