# SPDX-License-Identifier: Apache-2.0
.DEFAULT_GOAL := help

.PHONY: help
help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: protos
protos: ## generate the stubs in protos/ from its .proto files
	@deploy/dev/protos
