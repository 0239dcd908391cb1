// SPDX-License-Identifier: Apache-2.0

//go:build !race && linux && (amd64 || arm64)

package rawsocket

func beforeWrite() {}

func afterRead() {}
