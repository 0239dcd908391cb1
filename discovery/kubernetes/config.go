// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"errors"
	"fmt"
	"io/fs"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Config returns how to reach a cluster. For "" it is the cluster that this pod runs in, as its service account; else
// the current context of the kubeconfig file at that path. Config reads no other file. Errors name neither the file's
// folder nor its content.
func Config(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		config, err := rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			return nil, errors.New("kubernetes: this is no pod of a cluster: want the path of a kubeconfig file")
		}
		if err != nil {
			return nil, fmt.Errorf("kubernetes: this pod's service account: %w", withoutPath(err))
		}
		return config, nil
	}
	rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: kubeconfig}
	file, err := rules.Load() // paths in the file start at its folder
	if err != nil {
		return nil, fmt.Errorf("kubernetes: the kubeconfig file cannot be read: %w", withoutPath(err))
	}
	if _, ok := file.Contexts[file.CurrentContext]; !ok {
		return nil, errors.New("kubernetes: the kubeconfig file has no current context")
	}
	config, err := clientcmd.NewNonInteractiveClientConfig(*file, file.CurrentContext, &clientcmd.ConfigOverrides{},
		rules).ClientConfig()
	if err != nil {
		return nil, errors.New("kubernetes: the kubeconfig file's current context is not usable: want a cluster with " +
			"a server, a user, and the files that they name")
	}
	return config, nil
}

// withoutPath keeps the system's reason for a file error and drops the path. Of other errors it keeps nothing, since a
// file's content does not belong in a log.
func withoutPath(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return errors.New("not what was expected in it")
}
