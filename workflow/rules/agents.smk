# The user's agent: one episode, many at once, in groups, through the rollout controller.
rule agents:
    input:
        endpoint=RUN.server(SERVER).endpoint,
        assets=RUN.assets.file,
    output:
        verdict=report(
            RUN.agents.verdict,
            caption="../report/agents.rst",
            category="2 Agents",
            labels={"result": "verdict"},
        ),
        ran=RUN.agents.ran,
    log:
        LOGS / "agents.log",
    conda:
        "../envs/shakedown.yaml"
    resources:
        **placement(),
        gpu=0,
        exclude_file=str(RUN.excluded_nodes),
    params:
        section=section("agents", "serve", "model", "data"),
        out=RUN.agents.root,
        config=RUN.config,
    shell:
        "{{ shakedown agent checks --config {params.config:q} --endpoint {input.endpoint:q} "
        "--out {params.out:q} "
        "|| [ -s {output.verdict:q} ]; }} 2>&1 | tee {log:q}; touch {output.ran:q}"


rule accept_agents:
    input:
        verdict=rules.agents.output.verdict,
        ran=rules.agents.output.ran,
    output:
        RUN.agents.accepted,
    log:
        LOGS / "accept_agents.log",
    localrule: True
    conda:
        "../envs/shakedown.yaml"
    shell:
        "shakedown accept {input.verdict:q} --remove-on-fail {input.ran:q} --out {output:q} 2>&1 | tee {log:q}"
