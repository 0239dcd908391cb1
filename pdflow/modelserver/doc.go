// SPDX-License-Identifier: Apache-2.0

// Package modelserver reads ModelServer objects of a cluster or of a configuration file, and turns them into flows. An
// object says which model it serves with which connector, what happens when that fails, and what share of the requests
// another connector gets.
//
//	ms, err := modelserver.Read(object) // all that is wrong with it, by field
//	sel := ms.Spec.WorkloadSelector
//	source, err := kubernetes.New(&kubernetes.Options{Config: config, Namespace: ms.Namespace,
//		Selector: kubernetes.Selector{MatchLabels: sel.MatchLabels, PDGroup: (*kubernetes.PDGroup)(sel.PDGroup)}})
//	set := discovery.NewSet(source)
//	go set.Run(ctx)
//	flows, err := ms.Flows(pick.New(set, pick.TwoChoices()), nil)
//	mux, err := pdflow.NewMux() // the handler
//	err = mux.SetRoutes(map[string]pdflow.Server{ms.Model(): flows.Server})
//
// How engines are found is up to whoever makes the set: [Spec.WorkloadSelector] and [Spec.Discovery] say it, and
// [ModelServer.Endpoints] are those of a static list. cmd/gateway (sources.go, cluster.go) does all of it, while
// objects come, change and go. Connectors are found by name, so import those that objects may name, or connector/all.
package modelserver
