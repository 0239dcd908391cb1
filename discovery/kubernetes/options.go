// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"k8s.io/client-go/rest"

	"github.com/pdkit/pdkit/discovery"
)

// Options say which cluster to ask, and for what. Config and one of Selector.MatchLabels, Selector.PDGroup and Services are required.
type Options struct {
	Config *rest.Config // of the cluster; see [Config]. Not changed; its timeout does not bound watches

	// Cluster is the first part of the endpoints' IDs and groups' names, where several clusters are sources of one set: engines of two
	// clusters then never meet. "" for one cluster.
	Cluster string

	Namespace string // "" is default

	// Selector says which pods are engines, and what each is for. With Services it says what the pods behind them are for, and
	// pods that it does not choose are left out.
	Selector Selector

	// Services have the EndpointSlices of these services tell who is there, in place of the pods.
	Services []Service

	// Port is the engines' port: a number, or the name of a container's port (of a service's port, with Services). "" is the only port
	// of a service; of a pod it is the container port named http, else 8000.
	Port string

	Scheme     string            // of the engines' URLs: http (default) or https. Hosts are IP addresses, in certificates too
	Attributes map[string]string // of all endpoints, where a pod's annotations say nothing else; copied

	// Nodes has the zones of pods taken from their nodes, where no label of the pod says it. It needs list and watch on nodes, which is
	// cluster-wide. With Services it is not needed: EndpointSlices carry the zone.
	Nodes bool

	// OnError is told what is wrong, each fault once until it changes: the API server does not answer, or refuses (with the verb and
	// the resource), a pod has no such port, an annotation makes no sense. Until the API server answers, the last list stays. Called from several
	// goroutines, and must be quick. Nil allowed.
	OnError func(error)
}

// Selector chooses pods, as workloadSelector of a ModelServer does. A pod must have all labels of MatchLabels; without PDGroup each is of
// role both.
type Selector struct {
	MatchLabels map[string]string
	PDGroup     *PDGroup
}

// PDGroup says what a pod is for. A pod with all labels of PrefillLabels is of role prefill, with all of DecodeLabels decode, with both of them
// both, with all of EncodeLabels encode; with none of them, or without the label GroupKey, it is no engine.
type PDGroup struct {
	GroupKey      string            // prefill and decode engines meet within one value of this label; "": all are one group
	PrefillLabels map[string]string //
	DecodeLabels  map[string]string //
	EncodeLabels  map[string]string // not in the design documents: for an encode stage
}

// Service is a service whose EndpointSlices are read.
type Service struct {
	Name string         // in Options.Namespace
	Role discovery.Role // of all its endpoints; 0: what Selector says of the pods behind it, which needs list and watch on pods
}
