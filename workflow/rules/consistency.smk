# The same tokens scored by transformers and by the inference engine.
rule consistency:
    input:
        # After the agents: the server has then been seen to work under load.
        RUN.agents.accepted,
        endpoint=RUN.server(SERVER).endpoint,
        assets=RUN.assets.file,
    output:
        verdict=RUN.consistency.verdict,
        page=report(
            RUN.consistency.page,
            caption="../report/consistency.rst",
            category="3 Consistency",
            labels={"result": "token comparison"},
        ),
        ran=RUN.consistency.ran,
    log:
        LOGS / "consistency.log",
    conda:
        "../envs/shakedown.yaml"
    resources:
        **placement(),
        gpu=0,
        exclude_file=str(RUN.excluded_nodes),
    params:
        section=section("consistency", "serve", "model", "data", "seed"),
        out=RUN.consistency.root,
        config=RUN.config,
    shell:
        "{{ shakedown compare --config {params.config:q} --endpoint {input.endpoint:q} "
        "--out {params.out:q} "
        "|| [ -s {output.verdict:q} ]; }} 2>&1 | tee {log:q}; touch {output.ran:q} {output.page:q}"


rule accept_consistency:
    input:
        verdict=rules.consistency.output.verdict,
        ran=rules.consistency.output.ran,
    output:
        RUN.consistency.accepted,
    log:
        LOGS / "accept_consistency.log",
    localrule: True
    conda:
        "../envs/shakedown.yaml"
    shell:
        "shakedown accept {input.verdict:q} --remove-on-fail {input.ran:q} --out {output:q} 2>&1 | tee {log:q}"
